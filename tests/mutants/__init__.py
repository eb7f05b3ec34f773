"""Faulty samplers, planted one by one in the functions that the workers call, and the test that must notice each."""
