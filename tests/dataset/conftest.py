from dataset_folder import dataset, llm, made_datasets  # noqa: F401 - the fixtures of both folders
