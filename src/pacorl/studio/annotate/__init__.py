"""The page on which several people rank candidates, and the database behind it (`pacorl dataset annotate`).

store      SQLite: who is to rank what, who ranked what
sharing    sharing instances out, with an overlap and hidden control questions; agreement
server     starting, the HTTP API and the page
scoring    scores of what is being ranked, as far as people have come
simulate   annotators without a browser, and people of the tiny world
"""
