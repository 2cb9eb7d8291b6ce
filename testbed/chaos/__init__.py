"""Chaos: real processes and services are killed while mail flows, and every promise is checked afterwards.

What is disturbed and in which order is drawn from a seed before anything starts (`schedule`), and so is the mail
(`workload`); when things happen is up to the machine.
"""
