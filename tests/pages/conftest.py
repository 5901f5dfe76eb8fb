from dataset_folder import made_datasets  # noqa: F401 - a fixture of this folder too
