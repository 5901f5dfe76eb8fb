from dataset_folder import dataset  # noqa: F401 - a fixture of this folder too
