from dataset_folder import dataset, llm  # noqa: F401 - the fixtures of both folders
