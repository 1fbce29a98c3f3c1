"""Epochs, operators and the fleet as assets, the sensor that reports them, and their checks."""
