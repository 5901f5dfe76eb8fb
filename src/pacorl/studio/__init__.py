"""A local page to make, judge and compare sets (`pacorl studio`).

jobs     one piece of work at a time, with progress and cancelling
work     what the pieces are: painting and ranking, judging uploads
uploads  pictures that people hand in
server   the HTTP API and the page
desk     starting it
"""
