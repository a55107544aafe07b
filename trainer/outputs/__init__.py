"""What users take from a finished run: the cleaned data set (`incv clean`) and predictions for new images
(`incv predict`). Both read the run directory and write elsewhere; neither changes the run."""
