//! The messages between `cairn-blk` and its clients, `cairn-agent` and `cairn`.
//!
//! Each message is one JSON object on one line of a stream socket. A client sends a [`Request`] and
//! reads [`Event`]s until one of them [ends](Event::is_final) the exchange. Then it may send the
//! next request on the same connection.
//!
//! ```text
//! client                                     cairn-blk
//!   {"op":"checkpoint","wait":"stable"}  ──►
//!                                        ◄──  {"event":"accepted","snapshot":"vm1@3",...}
//!                                        ◄──  {"event":"stable","snapshot":"vm1@3",...}
//! ```
//!
//! The same messages travel over the host's control socket and over virtio-vsock. The guest may use
//! fewer of them: see [`Request::allowed_from_guest`].
//!
//! [`program`] is `cairn-agent` itself. Its command line is public for the manual pages.

pub mod program;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The version of this protocol, part of [`Status`]. It is raised only for a change that breaks old
/// clients.
pub const PROTOCOL_VERSION: u32 = 1;

/// The vsock port of a VM's first disk.
pub const DEFAULT_PORT: u32 = 7400;

/// The longest line in bytes, in both directions. A longer line is refused.
pub const MAX_LINE: usize = 64 * 1024;

/// The most snapshots in one answer. With the longest names and labels they fit into a line.
pub const MAX_LISTED: usize = 200;

/// The longest label of a snapshot, in bytes.
pub const MAX_LABEL: usize = 64;

/// A request of a client. A field that the operation does not have is refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "lowercase", from = "ReceivedRequest")]
pub enum Request {
    /// Takes a checkpoint of the disk that the process serves.
    Checkpoint(Checkpoint),
    /// Waits for the result of an accepted checkpoint, even if an earlier process accepted it. The
    /// answer is `Stable` or `Failed`.
    Follow(Follow),
    /// Asks for the properties and the state of the disk.
    Status,
    /// Lists the snapshots of the disk's image, oldest first.
    List,
    /// Marks snapshots that were taken from inside the guest as obsolete. For a guest only if the host
    /// allows that.
    Obsolete(Obsolete),
    /// Reads the counters since the start of the process. For the host only.
    Stats,
    /// Grows the disk to the size that its image has in the catalog. For the host only.
    Resize,
}

/// [`Request`] as it is parsed: serde refuses unknown fields of a variant with braces, but ignores
/// those of a variant without.
#[derive(Deserialize)]
#[serde(tag = "op", rename_all = "lowercase", deny_unknown_fields)]
enum ReceivedRequest {
    Checkpoint(Checkpoint),
    Follow(Follow),
    Status {},
    List {},
    Obsolete(Obsolete),
    Stats {},
    Resize {},
}

impl From<ReceivedRequest> for Request {
    fn from(received: ReceivedRequest) -> Request {
        match received {
            ReceivedRequest::Checkpoint(checkpoint) => Request::Checkpoint(checkpoint),
            ReceivedRequest::Follow(follow) => Request::Follow(follow),
            ReceivedRequest::Status {} => Request::Status,
            ReceivedRequest::List {} => Request::List,
            ReceivedRequest::Obsolete(obsolete) => Request::Obsolete(obsolete),
            ReceivedRequest::Stats {} => Request::Stats,
            ReceivedRequest::Resize {} => Request::Resize,
        }
    }
}

impl Request {
    /// Returns whether a guest may send this request over vsock.
    pub fn allowed_from_guest(&self) -> bool {
        match self {
            Request::Checkpoint(_)
            | Request::Follow(_)
            | Request::Status
            | Request::List
            | Request::Obsolete(_) => true,
            Request::Stats | Request::Resize => false,
        }
    }
}

/// The parameters of [`Request::Checkpoint`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Checkpoint {
    /// A second name for the snapshot, unique in its image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// What the client did to make the disk consistent. It is recorded, not verified.
    #[serde(default)]
    pub consistency: Consistency,
    /// The event that ends the exchange.
    #[serde(default)]
    pub wait: Wait,
    /// What the client says about the snapshot: values under keys.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
}

/// The parameters of [`Request::Obsolete`]: one of the two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Obsolete {
    /// The number of the snapshot to mark.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub number: Option<u64>,
    /// How many of the snapshots that were taken from inside the guest are not marked: the newest.
    /// All older ones among the last [`MAX_LISTED`] snapshots of the image are marked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_last: Option<u64>,
}

/// The parameters of [`Request::Follow`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Follow {
    /// The number of the snapshot, from [`Accepted`].
    pub number: u64,
}

/// How consistent the content of a snapshot is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Consistency {
    /// As after a power cut: synced data is present, and journals are replayed.
    #[default]
    Crash,
    /// The file systems were frozen: there is nothing to replay.
    Filesystem,
    /// The application had written its whole state and wrote nothing more.
    Application,
}

/// When the exchange of a checkpoint ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Wait {
    /// When the disk's state is frozen and the guest may continue to write.
    #[default]
    Accepted,
    /// When the snapshot is in the repository with its full redundancy.
    Stable,
}

/// An answer of `cairn-blk`, or a part of one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum Event {
    /// The disk's state is frozen. Writes that the guest submits after this event are not in the
    /// snapshot.
    Accepted(Accepted),
    /// The snapshot is published and durable. Follows `Accepted` if the client waits for it.
    Stable(Stable),
    /// The snapshot could not be stored. The next snapshot contains its changes.
    Failed(Failed),
    /// The answer to [`Request::Status`].
    Status(Status),
    /// The answer to [`Request::List`].
    Snapshots(Snapshots),
    /// The answer to [`Request::Obsolete`].
    Marked(Marked),
    /// The answer to [`Request::Stats`].
    Stats(Stats),
    /// The answer to [`Request::Resize`].
    Resized(Resized),
    /// The server did not execute the request.
    Error(Refusal),
}

impl Event {
    /// Returns whether this event ends the exchange of a client that waits for `wait`.
    pub fn is_final(&self, wait: Wait) -> bool {
        !matches!((self, wait), (Event::Accepted(_), Wait::Stable))
    }
}

/// The content of [`Event::Accepted`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accepted {
    /// `image@number`.
    pub snapshot: String,
    /// The snapshot's number.
    pub number: u64,
    /// Size of the chunks that changed since the last checkpoint, in bytes.
    pub dirty_bytes: u64,
    /// Time from reading the request to the answer, in microseconds.
    pub pause_us: u64,
}

/// The content of [`Event::Stable`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stable {
    /// `image@number`.
    pub snapshot: String,
    /// The snapshot's number.
    pub number: u64,
    /// Size of the chunks that changed since the last checkpoint, in bytes.
    pub dirty_bytes: u64,
    /// Bytes that the repository did not have before.
    pub stored_bytes: u64,
    /// Time from the request to this event, in milliseconds. Rounded to whole seconds if the
    /// snapshot was already stable when [`Request::Follow`] asked for it.
    pub elapsed_ms: u64,
}

/// The content of [`Event::Failed`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failed {
    /// `image@number`.
    pub snapshot: String,
    /// The snapshot's number.
    pub number: u64,
    /// Why it failed, and what to do.
    pub reason: String,
}

/// The content of [`Event::Status`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The [`PROTOCOL_VERSION`] of the process.
    pub protocol: u32,
    /// The image that the disk belongs to.
    pub image: String,
    /// The snapshot from which parts of the disk that are not local are fetched.
    pub parent: String,
    /// The disk's size in bytes.
    pub size: u64,
    /// The image's chunk size in bytes.
    pub chunk_size: u32,
    /// Whether the guest can write.
    pub read_only: bool,
    /// Whether a hypervisor is connected.
    pub connected: bool,
    /// Size of the chunks that changed since the last checkpoint, in bytes.
    pub dirty_bytes: u64,
    /// Bytes of the disk that are local.
    pub present_bytes: u64,
    /// Accepted checkpoints that are not stable, oldest first.
    pub pending: Vec<PendingCommit>,
    /// Why no checkpoint can be taken, if that is so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint_error: Option<String>,
    /// The last checkpoint that failed since the start of the process, if one did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_failed: Option<Failed>,
    /// The virtqueues, with counters since the start of the process.
    #[serde(default)]
    pub queues: Vec<QueueStatus>,
}

/// The state and the counters of a virtqueue.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueStatus {
    /// The number of the queue.
    pub queue: u32,
    /// Requests taken from the queue and not answered.
    pub in_flight: u64,
    /// Reads.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
    /// Flushes.
    pub flushes: u64,
    /// Discards and zero writes.
    pub discards: u64,
    /// Requests that ended with an error.
    pub errors: u64,
    /// The latency of reads.
    pub read_latency: Latency,
    /// The latency of writes.
    pub write_latency: Latency,
    /// The latency of flushes.
    pub flush_latency: Latency,
}

/// The latency of requests, from the moment that a request is taken from its queue to its answer.
/// The percentiles are rounded up by at most a quarter.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Latency {
    /// The number of requests.
    pub count: u64,
    /// The median in microseconds.
    pub p50_us: u64,
    /// The 99th percentile in microseconds.
    pub p99_us: u64,
    /// The longest in microseconds.
    pub max_us: u64,
}

/// A checkpoint that is being stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingCommit {
    /// `image@number`.
    pub snapshot: String,
    /// Chunks that changed.
    pub chunks: u64,
    /// Chunks that are stored.
    pub done: u64,
    /// Why storing fails at present, if it does. It is retried.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
}

/// The content of [`Event::Resized`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resized {
    /// The disk's size in bytes.
    pub size: u64,
}

/// The content of [`Event::Snapshots`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshots {
    /// The snapshots, oldest first.
    pub snapshots: Vec<SnapshotLine>,
    /// Number of older snapshots that are left out, because a line is bounded.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub omitted: u64,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// One snapshot in a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotLine {
    /// `image@number`.
    pub snapshot: String,
    /// The snapshot's label.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// `pending`, `available`, `stable` or `failed`. A snapshot that is `available` can be read and
    /// has less than its redundancy.
    pub state: String,
    /// The time of the request, in seconds since 1970, UTC.
    pub time: u64,
}

/// The content of [`Event::Marked`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Marked {
    /// The snapshots that the request has marked: `image@number`.
    pub snapshots: Vec<String>,
}

/// The content of [`Event::Stats`]. All counters start at 0 with the process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// Guest reads.
    pub reads: u64,
    /// Guest writes.
    pub writes: u64,
    /// Guest flushes.
    pub flushes: u64,
    /// Guest discards and zero writes.
    pub discards: u64,
    /// Requests that ended with an error.
    pub errors: u64,
    /// Bytes read by the guest.
    pub read_bytes: u64,
    /// Bytes written by the guest.
    pub written_bytes: u64,
    /// Chunks fetched from the repository for the guest.
    pub fetched_chunks: u64,
    /// Bytes fetched from the repository for the guest.
    pub fetched_bytes: u64,
    /// Fetches that failed.
    pub fetch_errors: u64,
    /// Reads of the mirror that found a block unreadable.
    #[serde(default)]
    pub bad_blocks: u64,
    /// Copies that copy-on-write made.
    pub copies: u64,
    /// Bytes that copy-on-write copied.
    pub copied_bytes: u64,
    /// Copies that went to the mirror's disk because the memory for them was in use.
    pub spilled: u64,
    /// Requests that had to wait for a fetch, a copy, a claim or the start of a checkpoint.
    pub parked: u64,
    /// Accepted checkpoints.
    pub checkpoints: u64,
    /// Checkpoints that became stable.
    pub stable: u64,
    /// Checkpoints that failed.
    pub failed: u64,
    /// Checkpoints that failed because there was no space for copies and storing made no progress.
    #[serde(default)]
    pub stalls: u64,
}

/// Why the server did not execute a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// What the client can do about it.
    pub kind: RefusalKind,
    /// The reason in words.
    pub message: String,
}

/// What a client can do about a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RefusalKind {
    /// The request is wrong: change it.
    Invalid,
    /// The label is in use: choose another.
    Conflict,
    /// Too many checkpoints are in progress: try again later.
    Busy,
    /// The request is not allowed on this socket or on this disk.
    Denied,
    /// Something on the host does not work: tell the operator.
    Unavailable,
}

/// Returns whether `label` can be the label of a snapshot.
///
/// A label consists of letters, digits, `.`, `_` and `-`. It has at most [`MAX_LABEL`] bytes, does
/// not consist of digits alone (so that it does not look like a number), and does not start with
/// `-` or `.`.
pub fn is_valid_label(label: &str) -> bool {
    !label.is_empty()
        && label.len() <= MAX_LABEL
        && label.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
        && !label.bytes().all(|b| b.is_ascii_digit())
        && !label.starts_with(['-', '.'])
}

#[cfg(test)]
mod tests {
    use super::{Accepted, Checkpoint, Consistency, Event, Request, Wait, is_valid_label};

    #[test]
    fn a_checkpoint_request_needs_no_field_but_the_operation() {
        let request: Request = serde_json::from_str(r#"{"op":"checkpoint"}"#).unwrap();
        assert_eq!(request, Request::Checkpoint(Checkpoint::default()));
    }

    #[test]
    fn the_wire_form_of_a_checkpoint_is_stable() {
        let request = Request::Checkpoint(Checkpoint {
            label: Some("before-upgrade".into()),
            consistency: Consistency::Filesystem,
            wait: Wait::Stable,
            ..Checkpoint::default()
        });
        let line = serde_json::to_string(&request).unwrap();
        assert_eq!(
            line,
            r#"{"op":"checkpoint","label":"before-upgrade","consistency":"filesystem","wait":"stable"}"#
        );
        assert_eq!(serde_json::from_str::<Request>(&line).unwrap(), request);
    }

    #[test]
    fn an_unknown_field_is_refused_rather_than_ignored() {
        assert!(serde_json::from_str::<Request>(r#"{"op":"checkpoint","lable":"x"}"#).is_err());
        assert!(serde_json::from_str::<Request>(r#"{"op":"format"}"#).is_err());
        assert!(serde_json::from_str::<Request>(r#"{"op":"follow","number":1,"x":1}"#).is_err());
        for op in ["status", "list", "stats"] {
            let plain = format!(r#"{{"op":"{op}"}}"#);
            assert!(serde_json::from_str::<Request>(&plain).is_ok(), "{plain}");
            let more = format!(r#"{{"op":"{op}","x":1}}"#);
            assert!(serde_json::from_str::<Request>(&more).is_err(), "{more}");
        }
    }

    #[test]
    fn accepted_ends_only_an_exchange_that_waits_for_accepted() {
        let accepted = Event::Accepted(Accepted {
            snapshot: "a@1".into(),
            number: 1,
            dirty_bytes: 0,
            pause_us: 1,
        });
        assert!(accepted.is_final(Wait::Accepted));
        assert!(!accepted.is_final(Wait::Stable));
    }

    #[test]
    fn labels_cannot_be_mistaken_for_numbers_or_paths() {
        for good in ["a", "before-upgrade", "v1.2_rc", "2024-01-01"] {
            assert!(is_valid_label(good), "{good}");
        }
        for bad in ["", "7", "-x", ".x", "a/b", "a b", "ä", &"x".repeat(65)] {
            assert!(!is_valid_label(bad), "{bad}");
        }
    }
}
