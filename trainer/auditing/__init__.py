"""`incv audit`: INCV on a folder of images, with settings chosen for the data and the machine."""
