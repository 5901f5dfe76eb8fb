"""The page on which several people rank candidates (`pacorl dataset annotate`)."""
