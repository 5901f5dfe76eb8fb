"""The page on which several people rank candidates, and the database behind it (`pacorl dataset annotate`).

store      SQLite: assignments and rankings
sharing    sharing instances out, with an overlap and hidden control questions; agreement
server     starting, the HTTP API and the page
scoring    scores of the images, from all rankings so far
"""
