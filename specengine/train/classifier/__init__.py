"""Train the classifiers of C2T, Disco and SpecDec++."""
