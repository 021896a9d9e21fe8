//! The document of a commit of an image.

use tempfile::TempDir;

use super::{Commit, begin_commit_of_image};
use crate::catalog::commit_key;
use crate::documents::{Change, Query};
use crate::repository::Repository;

/// A process was stopped, or its catalog was away, for longer than its document lasts.
#[test]
fn a_document_that_has_expired_is_renewed_after_the_commit_has_begun_again() {
    let dir = TempDir::new().unwrap();
    let url = format!("dir:{}", dir.path().join("repository").display());
    let repository = Repository::open_or_create(&url).unwrap();
    let commit = Commit::of_image(&repository).unwrap();
    let lease = commit.lease.as_ref().unwrap();
    let key = commit_key(lease.id());
    let version = || repository.documents().read(&[Query::key(&key)]).unwrap().version(&key);
    let renewed = || {
        let before = version();
        repository.leases().renew_all();
        version() > before
    };
    assert!(renewed() && lease.is_held());
    let expired = Change::default().remove(Query::key(&key));
    assert!(repository.documents().commit(&expired).unwrap());
    assert!(!renewed() && !lease.is_held());
    lease.create_again(begin_commit_of_image).unwrap();
    assert!(renewed() && lease.is_held());
    drop(commit);
    assert_eq!(version(), 0);
}
