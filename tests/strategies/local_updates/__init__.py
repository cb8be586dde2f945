"""Tests of training with local updates."""
