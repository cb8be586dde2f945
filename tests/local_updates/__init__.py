"""Tests of the methods and rules of local updates."""
