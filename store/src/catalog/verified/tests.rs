//! The times of verifications.

use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};
use tempfile::TempDir;

use super::{NUMBERS, Verified, VerifiedDocument, VerifiedTimes};
use crate::geometry::Geometry;
use crate::repository::Repository;
use crate::snapshot::Snapshot;

/// A repository with an image, whose only snapshot stands for all others.
fn image() -> (TempDir, Repository, Snapshot) {
    let dir = TempDir::new().unwrap();
    let url = format!("dir:{}", dir.path().join("repository").display());
    let repository = Repository::open_or_create(&url).unwrap();
    let geometry = Geometry::new(1 << 20, 1 << 18).unwrap();
    let snapshot = repository.create_image(&"vm1".parse().unwrap(), geometry).unwrap();
    (dir, repository, snapshot)
}

fn numbered(snapshot: &Snapshot, numbers: impl IntoIterator<Item = u64>) -> Vec<Snapshot> {
    let number = |number| Snapshot { number, ..snapshot.clone() };
    numbers.into_iter().map(number).collect()
}

/// Verifies snapshots, and finds all of them in the same state.
fn verify(repository: &Repository, all: &[Snapshot], verified: Verified, time: u64) -> u64 {
    let catalog = repository.catalog();
    let basis = catalog.begin_verification(all).unwrap();
    let found: Vec<_> = all.iter().map(|one| (one, verified)).collect();
    catalog.end_verification(&basis, &found, time).unwrap()
}

#[test]
fn many_snapshots_share_a_small_document() {
    let (_dir, repository, snapshot) = image();
    let all = numbered(&snapshot, 1..=10 * NUMBERS);
    assert_eq!(verify(&repository, &all, Verified::Whole, 1000), 10 * NUMBERS);
    let times = repository.catalog().verified(&snapshot.image).unwrap();
    assert_eq!(times.runs.len(), 11, "a run in each document");
    assert!((1..=10 * NUMBERS).all(|number| times.of(number) == Some(1000)));
    assert_eq!((times.of(0), times.of(10 * NUMBERS + 1)), (None, None));
}

#[test]
fn damage_takes_the_time_back_and_an_older_verification_does_not_return_it() {
    let (_dir, repository, snapshot) = image();
    let catalog = repository.catalog();
    let all = numbered(&snapshot, [1, 2, 3, 5, NUMBERS]);
    verify(&repository, &all, Verified::Whole, 1000);
    let times = || {
        let times = catalog.verified(&snapshot.image).unwrap();
        [1, 2, 3, 4, 5, NUMBERS].map(|number| times.of(number))
    };
    let first = Some(1000);
    assert_eq!(times(), [first, first, first, None, first, first], "4 was not verified");

    let older = catalog.begin_verification(&all).unwrap();
    verify(&repository, &all[1..2], Verified::Damaged, 2000);
    assert_eq!(times(), [first, None, first, None, first, first]);
    let found: Vec<_> = all.iter().map(|one| (one, Verified::Whole)).collect();
    // It has read the blob before it was damaged. Only the document without a finding changes.
    assert_eq!(catalog.end_verification(&older, &found, 1500).unwrap(), 1);
    assert_eq!(times(), [first, None, first, None, first, Some(1500)]);

    verify(&repository, &all, Verified::Whole, 3000);
    assert_eq!(times()[..3], [Some(3000); 3]);
    // An older time does not replace a newer one.
    verify(&repository, &all, Verified::Whole, 2500);
    assert_eq!(times()[0], Some(3000));
}

#[test]
fn a_removed_image_leaves_no_document() {
    let (_dir, repository, snapshot) = image();
    let all = numbered(&snapshot, [1, 2]);
    let basis = repository.catalog().begin_verification(&all).unwrap();
    verify(&repository, &all, Verified::Whole, 1000);
    repository.remove_image(&snapshot.image, false).unwrap();
    let found = [(&all[0], Verified::Whole)];
    assert_eq!(repository.catalog().end_verification(&basis, &found, 2000).unwrap(), 0);
    let query = crate::documents::Query::prefix("verified/");
    let left = repository.documents().read(&[query]).unwrap().documents;
    assert!(left.is_empty(), "{left:?}");
    // Another image of that name was never verified.
    let geometry = snapshot.geometry;
    repository.create_image(&snapshot.image, geometry).unwrap();
    assert_eq!(repository.catalog().verified(&snapshot.image).unwrap().of(1), None);
}

proptest! {
    #[test]
    fn runs_have_the_times_of_a_map(
        edits in vec((0..NUMBERS, 0..40_u64, any::<bool>(), 0..4_u64), 0..30),
    ) {
        let (mut document, mut model) = (VerifiedDocument::default(), BTreeMap::new());
        for (first, len, is_whole, time) in edits {
            let mut times = document.times();
            for number in first..(first + len).min(NUMBERS) {
                match is_whole {
                    true => drop((times.insert(number, time), model.insert(number, time))),
                    false => drop((times.remove(&number), model.remove(&number))),
                }
            }
            document.set_times(&times);
        }
        let times = VerifiedTimes { runs: document.runs.clone() };
        for number in 0..NUMBERS {
            prop_assert_eq!(times.of(number), model.get(&number).copied());
        }
        prop_assert!(document.runs.len() <= model.len());
        let text = serde_json::to_string(&document).unwrap();
        prop_assert_eq!(serde_json::from_str::<VerifiedDocument>(&text).unwrap(), document);
    }
}
