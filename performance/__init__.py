"""The measuring suite. Figures are ratios of things measured in one run on one machine; absolute times are for orientation."""
