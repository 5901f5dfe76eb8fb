"""The page on which several people rank candidates, and the database behind it (`pacorl dataset annotate`).

launch     opening the database, sharing the work out, serving
store      SQLite: who is to rank what, who ranked what
assign     sharing instances out, with an overlap and hidden control questions
agreement  Kendall's W, Krippendorff's α
server     the HTTP API and the page
simulate   annotators without a browser, and people of the tiny world
"""
