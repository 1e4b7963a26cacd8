"""Octavo inside other projects: each part imports its project, and nothing else imports the part."""
