"""Integrations with other libraries; each needs packages of its own, which an extra installs."""
