//! Data that this version has written, kept as files. Every later version must read them, or have
//! another version of the format and refuse them by it.
//!
//! `cargo test -p cairn-store --test store make_the_fixtures -- --ignored` writes them anew after a
//! change of a version.

use std::fs;
use std::path::{Path, PathBuf};

use cairn_store::cluster::peer::PeerStore;
use cairn_store::cluster::protocol::{
    Answer, DeletedFragments, FragmentId, FragmentPart, Held, PeerTime, Request, StampBound, Usage,
};
use cairn_store::collection::CollectionNumber;
use cairn_store::encoding::fragment::{Blocks, Description, Fragment, encode, encode_record};
use cairn_store::encoding::{Redundancy, SealKeys, StoragePolicy};
use cairn_store::{BlobId, Mode, PeerId, Repository, Root, Snapshot};
use tempfile::TempDir;

use crate::support::{assert_holds, disk, name, new_snapshot, owner, write};

const SEEDS: [(u64, u64); 3] = [(0, 7), (1, 8), (999, 7)];
const PEER: PeerId = PeerId::from_bytes([0xc4; 16]);

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

fn keys() -> SealKeys {
    SealKeys::new(&[[0x5e; 32]])
}

/// Content of three frames. The first two shrink.
fn content() -> Vec<u8> {
    let mut content = b"a line of a log, and another one\n".repeat(4000);
    let mut noise = vec![0; 10_000];
    blake3::Hasher::new().update(b"noise").finalize_xof().fill(&mut noise);
    content.extend(noise);
    content
}

/// Encodings of the content: a copy, compressed blocks, and a record.
fn encodings() -> [(Description, Blocks); 3] {
    let (content, record) = (content(), br#"{"format":"cairn-snapshot-record"}"#);
    let blob = BlobId::of(&content);
    let redundancy: Redundancy = "rs=2+1".parse().unwrap();
    let compressed = StoragePolicy { redundancy, compression: "zstd".parse().unwrap() };
    [
        encode(&blob, &content, Redundancy::NONE),
        encode(&blob, &content, compressed),
        encode_record(&BlobId::of(record), record, Redundancy::NONE),
    ]
}

fn fragment((description, blocks): &(Description, Blocks), index: u8) -> Fragment {
    let mut description = description.clone();
    description.seal = keys().seal(&description);
    Fragment { description, index, block: blocks.share(index.into()) }
}

/// The fragments of the peer.
fn fragments() -> [Fragment; 3] {
    let [copy, blocks, record] = &encodings();
    [fragment(copy, 0), fragment(blocks, 2), fragment(record, 0)]
}

fn held(fragment: &Fragment) -> Held {
    let Fragment { description, index, .. } = fragment;
    let (data, width) = (description.needed() as u8, description.width() as u8);
    Held {
        encoding: description.id(),
        data,
        parity: width - data,
        index: *index,
        kind: description.kind(),
        len: description.block_len() as u32,
        seal: description.seal,
    }
}

/// A message of each kind, with its name.
fn messages() -> Vec<(&'static str, (u16, Vec<u8>))> {
    let [_, blocks, record] = fragments();
    let blob = blocks.description.blob;
    let id = FragmentId { blob, encoding: blocks.description.id(), index: 2 };
    let stamp = CollectionNumber(0x0123_4567);
    let part = FragmentPart {
        description: blocks.description.clone(),
        index: 2,
        offset: 3,
        bytes: blocks.block.slice(3..8),
    };
    let requests = [
        ("put", Request::Put { stamp, fragments: vec![record.clone()] }),
        ("get", Request::Get(blob)),
        ("get-range", Request::GetRange { blob, offset: 70_000, len: 4096 }),
        ("get-fragment", Request::GetFragment(id)),
        ("have", Request::Have { renew: Some(stamp), blobs: vec![blob] }),
        ("usage", Request::Usage),
        ("clock", Request::Clock),
        (
            "delete",
            Request::Delete {
                deadline: PeerTime(9),
                idle: 60,
                bound: StampBound { below: stamp, number: CollectionNumber(0x0123_4568) },
                is_dry: true,
                fragments: vec![id],
            },
        ),
        ("records", Request::Records(blob)),
        ("list", Request::List { after: blob, most: 100 }),
        ("reserve", Request::Reserve(1 << 30)),
    ];
    let usage = Usage { capacity: 4, used: 3, reserved: 2, fragments: 1 };
    let answers = [
        ("stored", Answer::Stored),
        ("fragments", Answer::Fragments(vec![record])),
        ("parts", Answer::Parts(vec![part])),
        ("held", Answer::Held(vec![vec![held(&blocks)], Vec::new()])),
        ("used", Answer::Usage(usage)),
        ("time", Answer::Clock(PeerTime(9))),
        ("deleted", Answer::Deleted(DeletedFragments { fragments: 1, bytes: 4096 })),
        ("listed", Answer::Listed(vec![(blob, held(&blocks))])),
        ("reserved", Answer::Reserved),
    ];
    let requests = requests.iter().map(|(name, request)| (*name, request.to_body()));
    requests.chain(answers.iter().map(|(name, answer)| (*name, answer.to_body()))).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn message_text() -> String {
    let line =
        |(name, (kind, body)): (&str, (u16, Vec<u8>))| format!("{name} {kind} {}\n", hex(&body));
    messages().into_iter().map(line).collect()
}

/// Copies a fixture to a temporary directory, because opening it changes it.
fn copy(name: &str) -> TempDir {
    let dir = TempDir::new().unwrap();
    copy_all(&fixtures().join(name), dir.path());
    dir
}

fn copy_all(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy_all(&entry.path(), &target),
            false => drop(fs::copy(entry.path(), target).unwrap()),
        }
    }
}

/// Writes what a process has left in `from`, without the files that only a running process needs.
fn keep(from: &Path, name: &str) {
    let to = fixtures().join(name);
    let _ = fs::remove_dir_all(&to);
    copy_all(from, &to);
    for file in ["lock", "catalog.db-shm", "index.db-shm", "fragments.db-shm"] {
        let _ = fs::remove_file(to.join(file));
    }
}

#[test]
#[ignore = "it writes the fixtures"]
fn make_the_fixtures() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("repository");
    let repository = Repository::open_or_create(&format!("dir:{}", path.display())).unwrap();
    let root = write(&repository, &Root::default(), &SEEDS);
    let first = repository.publish_image(&name("vm/disk"), disk(1000), &root, 10, 20).unwrap();
    let mirror = repository.attach(&owner(1), &first, Mode::ReadWrite).unwrap();
    let number = mirror.reserve(1).unwrap().start;
    drop(mirror.begin(&new_snapshot(number)).unwrap());
    mirror.fail(number, "the fixture says so").unwrap();
    drop((mirror, repository));
    keep(&path, "repository");
    let path = dir.path().join("peer");
    let store = PeerStore::open_as(&path, Some(1 << 30), Some(PEER)).unwrap();
    store.put(&fragments()).unwrap().into_iter().for_each(|result| result.unwrap());
    store.flush().unwrap();
    drop(store);
    keep(&path, "peer");
    fs::write(fixtures().join("messages.txt"), message_text()).unwrap();
}

#[test]
fn a_repository_of_this_version_is_read() {
    let dir = copy("repository");
    let repository = Repository::open(&format!("dir:{}", dir.path().display())).unwrap();
    let all = repository.catalog().snapshots(&name("vm/disk")).unwrap();
    let states: Vec<_> = all.iter().map(|one: &Snapshot| (one.number, one.state)).collect();
    assert_eq!(format!("{states:?}"), "[(1, Stable), (2, Failed)]");
    assert_holds(&repository, &all[0], &SEEDS);
    assert_eq!(all[1].reason.as_deref(), Some("the fixture says so"));
    assert_eq!(repository.catalog().mirrors().unwrap().len(), 1);
}

/// With the index, and from the segments alone.
#[test]
fn the_segments_of_this_version_are_read_without_the_index() {
    let dir = copy("repository");
    for file in ["index.db", "index.db-wal"] {
        let _ = fs::remove_file(dir.path().join(file));
    }
    let repository = Repository::open(&format!("dir:{}", dir.path().display())).unwrap();
    let all = repository.catalog().snapshots(&name("vm/disk")).unwrap();
    assert_holds(&repository, &all[0], &SEEDS);
}

#[test]
fn a_peer_of_this_version_is_read_with_its_table_and_without() {
    for without in [&[][..], &["fragments.db", "fragments.db-wal"]] {
        let dir = copy("peer");
        for file in without {
            let _ = fs::remove_file(dir.path().join(file));
        }
        let store = PeerStore::open_as(dir.path(), None, Some(PEER)).unwrap();
        for wanted in fragments() {
            let found = store.get(&wanted.description.blob).unwrap();
            let found = found.iter().find(|one| one.index == wanted.index && **one == wanted);
            let found = found.unwrap_or_else(|| panic!("{:?} is missing", wanted.description));
            assert!(keys().is_sealed(&found.description));
            assert_eq!(found.description.seal, wanted.description.seal);
        }
        assert_eq!(store.usage().unwrap().fragments, 3);
    }
}

/// The compressed bytes are those of the fixture: another version of a codec may write others.
#[test]
fn messages_of_this_version_have_the_same_bytes() {
    let text = fs::read_to_string(fixtures().join("messages.txt")).unwrap();
    let mut names = Vec::new();
    for line in text.lines() {
        let [name, kind, body] = line.split(' ').collect::<Vec<_>>()[..] else {
            panic!("{line}");
        };
        let kind: u16 = kind.parse().unwrap();
        let body: Vec<u8> = (0..body.len() / 2)
            .map(|at| u8::from_str_radix(&body[2 * at..2 * at + 2], 16).unwrap())
            .collect();
        let again = match kind < 100 {
            true => Request::from_body(kind, &body).unwrap().to_body(),
            false => Answer::from_body(kind, &body).unwrap().to_body(),
        };
        assert_eq!(again, (kind, body), "{name}");
        names.push(name.to_string());
    }
    let known: Vec<_> = messages().into_iter().map(|(name, _)| name.to_string()).collect();
    assert_eq!(names, known, "each kind has a fixture");
}
