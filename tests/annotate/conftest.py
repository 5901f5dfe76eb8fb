from dataset_folder import dataset, made_datasets  # noqa: F401 - fixtures of this folder too
