"""Measure memory and throughput on this machine: the cases of `ballast bench`, their ranks, and the report."""
