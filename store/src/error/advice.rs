//! Messages that depend on more than the fields of an error.

/// What to do about an error of SQLite.
pub(super) fn database_advice(error: &rusqlite::Error) -> &'static str {
    use rusqlite::ErrorCode;
    match error.sqlite_error_code() {
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => {
            "; if index.db in the repository is damaged, stop all programs that use the repository and \
             remove index.db with index.db-wal and index.db-shm: it is made again from the data. If \
             catalog.db is damaged, restore it from a backup"
        }
        Some(ErrorCode::ReadOnly | ErrorCode::CannotOpen | ErrorCode::PermissionDenied) => {
            "; a repository needs a directory that this user may write to, with some free space, also for \
             reading: copy it to such a place"
        }
        _ => "",
    }
}

/// The message of [`PeersMissing`](super::Error::PeersMissing).
pub(super) fn peers_missing(answered: &[String], silent: &[String], recorded: u64) -> String {
    let members = answered.len() + silent.len();
    let expected = recorded.max(members as u64);
    let mut text = format!("{} of {expected} peers answer", answered.len());
    if !answered.is_empty() {
        text += &format!(" ({})", answered.join(" "));
    }
    if !silent.is_empty() {
        text += &format!("; no answer from {}", silent.join(", "));
    }
    if recorded > members as u64 {
        text += &format!("; {recorded} peers were members when the newest record was written");
    }
    text + "; start the others first. If a peer was removed on purpose since then, or will not \
            return, use --force to rebuild from these alone: snapshots that only the others know \
            are missed, and removed ones may return"
}
