"""Training of the classifiers that C2T, Disco and SpecDec++ read."""
