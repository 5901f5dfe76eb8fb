-- The database of a dataset's rankings; every start executes this.
PRAGMA journal_mode=WAL;
PRAGMA synchronous=FULL;
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
-- is_admin: 0 ranks, 1 administers, 2 adjudicates.
CREATE TABLE IF NOT EXISTS people (
    name TEXT PRIMARY KEY, token_hash TEXT UNIQUE NOT NULL, expires REAL NOT NULL, is_admin INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS instances (
    id TEXT PRIMARY KEY, key TEXT UNIQUE NOT NULL, content TEXT NOT NULL, is_control INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS assignments (
    person TEXT NOT NULL, place INTEGER NOT NULL, instance TEXT NOT NULL REFERENCES instances(id),
    is_open INTEGER NOT NULL, PRIMARY KEY (person, place), UNIQUE (person, instance)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS open_assignments ON assignments (person, place) WHERE is_open;
CREATE TABLE IF NOT EXISTS answers (
    person TEXT NOT NULL, instance TEXT NOT NULL, ranking TEXT, skipped TEXT, at REAL NOT NULL,
    seconds REAL, number INTEGER NOT NULL, PRIMARY KEY (person, instance)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS answers_in_order ON answers (person, number);
CREATE TABLE IF NOT EXISTS events (
    number INTEGER PRIMARY KEY AUTOINCREMENT, request TEXT UNIQUE NOT NULL, person TEXT NOT NULL,
    kind TEXT NOT NULL, instance TEXT NOT NULL, content TEXT, at REAL NOT NULL);
-- Each task looks at what its person did with it last: of 40,000 events that took 2 ms without.
CREATE INDEX IF NOT EXISTS events_of ON events (person, instance);
