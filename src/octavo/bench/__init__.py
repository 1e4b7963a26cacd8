"""Suites of timed cases, run side by side with PyTorch, torch.compile and other libraries; results as JSON."""
