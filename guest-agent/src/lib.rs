//! The messages that the agent, the control socket and `cairn` speak.
//!
//! One JSON object a line in each direction, over a stream socket. A client sends a
//! [`Request`] and reads [`Event`]s until one that [ends](Event::is_final) the exchange; then it may
//! send the next request on the same connection.
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

use serde::{Deserialize, Serialize};

/// The version of this protocol, told in [`Status`]. It grows only when old clients would break.
pub const PROTOCOL_VERSION: u32 = 1;

/// The vsock port of a VM's first disk.
pub const DEFAULT_PORT: u32 = 7400;

/// A longer line is refused, in both directions.
pub const MAX_LINE: usize = 64 * 1024;

/// The most snapshots in one answer: with the longest names and labels they fit into a line.
pub const MAX_LISTED: usize = 200;

/// The longest label of a snapshot.
pub const MAX_LABEL: usize = 64;

/// What a client may ask.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "lowercase", deny_unknown_fields)]
pub enum Request {
    /// Take a checkpoint of the disk this process serves.
    Checkpoint(Checkpoint),
    /// What becomes of a checkpoint that was accepted, perhaps by a process before this one. Answered with
    /// `Stable` or `Failed` when it has ended.
    Follow(Follow),
    /// What the disk is and does.
    Status,
    /// The snapshots of this disk's image, oldest first.
    List,
    /// Counters since the start. For the host only.
    Stats,
}

impl Request {
    /// Whether a guest may ask this over vsock.
    pub fn allowed_from_guest(&self) -> bool {
        match self {
            Request::Checkpoint(_) | Request::Follow(_) | Request::Status | Request::List => true,
            Request::Stats => false,
        }
    }
}

/// The details of a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Checkpoint {
    /// A second name for the snapshot, unique in its image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// What the caller did to make the disk consistent.
    #[serde(default)]
    pub consistency: Consistency,
    /// How long to keep answering.
    #[serde(default)]
    pub wait: Wait,
}

/// See [`Request::Follow`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Follow {
    /// The snapshot's number, as it was accepted.
    pub number: u64,
}

/// How much the content of a snapshot can be relied on after a restart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Consistency {
    /// As after a power cut: what was synced is there, journals replay.
    #[default]
    Crash,
    /// The file systems were frozen: nothing to replay.
    Filesystem,
    /// The application had written its whole state and was quiet.
    Application,
}

/// When the exchange of a checkpoint ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Wait {
    /// When the cut is made and the guest may go on.
    #[default]
    Accepted,
    /// When the snapshot is in the repository with its full redundancy.
    Stable,
}

/// What `cairn-blk` answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum Event {
    /// The cut is made: whatever the guest writes from here on is not in the snapshot.
    Accepted(Accepted),
    /// The snapshot is published and durable. Follows `Accepted` when the client waits for it.
    Stable(Stable),
    /// The snapshot could not be stored. Its changes go into the next one.
    Failed(Failed),
    /// Answer to [`Request::Status`].
    Status(Status),
    /// Answer to [`Request::List`].
    Snapshots(Snapshots),
    /// Answer to [`Request::Stats`].
    Stats(Stats),
    /// The request was not carried out.
    Error(Refusal),
}

impl Event {
    /// Whether this event ends the exchange that `wait` asked for.
    pub fn is_final(&self, wait: Wait) -> bool {
        !matches!((self, wait), (Event::Accepted(_), Wait::Stable))
    }
}

/// See [`Event::Accepted`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accepted {
    /// `image@number`.
    pub snapshot: String,
    /// The snapshot's number.
    pub number: u64,
    /// Bytes of the chunks that changed since the last checkpoint.
    pub dirty_bytes: u64,
    /// From reading the request to having the answer, in microseconds.
    pub pause_us: u64,
}

/// See [`Event::Stable`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stable {
    /// `image@number`.
    pub snapshot: String,
    /// The snapshot's number.
    pub number: u64,
    /// Bytes of the chunks that changed since the last checkpoint.
    pub dirty_bytes: u64,
    /// Bytes that the repository did not have yet.
    pub stored_bytes: u64,
    /// From the request to here, in milliseconds; by whole seconds if it was stable before it was asked
    /// for with [`Request::Follow`].
    pub elapsed_ms: u64,
}

/// See [`Event::Failed`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failed {
    /// `image@number`.
    pub snapshot: String,
    /// The snapshot's number.
    pub number: u64,
    /// Why, and what to do.
    pub reason: String,
}

/// See [`Event::Status`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// [`PROTOCOL_VERSION`] of the answering process.
    pub protocol: u32,
    /// The image this disk belongs to.
    pub image: String,
    /// The snapshot that the disk's unwritten parts come from.
    pub parent: String,
    /// The disk's size in bytes.
    pub size: u64,
    /// The image's chunk size in bytes.
    pub chunk_size: u32,
    /// Whether the guest can write.
    pub read_only: bool,
    /// Whether a hypervisor is connected.
    pub connected: bool,
    /// Bytes of the chunks changed since the last checkpoint.
    pub dirty_bytes: u64,
    /// Bytes of the disk that are local.
    pub present_bytes: u64,
    /// Checkpoints that are accepted but not stable, oldest first.
    pub pending: Vec<PendingCommit>,
    /// What prevents checkpoints, if something does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
    /// The virtqueues, with counters since the start of the process.
    #[serde(default)]
    pub queues: Vec<QueueStatus>,
}

/// What a virtqueue does and did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueStatus {
    /// Its number.
    pub queue: u32,
    /// Requests that were taken and not answered.
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
    /// How long reads took.
    pub read_latency: Latency,
    /// How long writes took.
    pub write_latency: Latency,
    /// How long flushes took.
    pub flush_latency: Latency,
}

/// How long requests took, from the moment that they were taken to their answer. The percentiles are
/// rounded up by at most a quarter.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Latency {
    /// How many requests.
    pub count: u64,
    /// The median in microseconds.
    pub p50_us: u64,
    /// The 99th percentile in microseconds.
    pub p99_us: u64,
    /// The longest in microseconds.
    pub max_us: u64,
}

/// A checkpoint on its way into the repository.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingCommit {
    /// `image@number`.
    pub snapshot: String,
    /// Chunks that changed.
    pub chunks: u64,
    /// Of these, how many are stored.
    pub done: u64,
    /// Why it does not get on at present, if so; it is tried again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
}

/// See [`Event::Snapshots`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshots {
    /// Oldest first.
    pub snapshots: Vec<SnapshotLine>,
    /// How many older ones were left out, because a line is bounded.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub omitted: u64,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// One snapshot as the guest may see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotLine {
    /// `image@number`.
    pub snapshot: String,
    /// The snapshot's label.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// `pending`, `stable` or `failed`.
    pub state: String,
    /// When it was asked for: seconds since 1970, UTC.
    pub time: u64,
}

/// See [`Event::Stats`]. All counters start at 0 with the process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// Guest requests by kind.
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
    /// Blocks of the mirror that could not be read, each time that one was found.
    #[serde(default)]
    pub bad_blocks: u64,
    /// Copies made by copy-on-write.
    pub copies: u64,
    /// Bytes of these copies.
    pub copied_bytes: u64,
    /// Copies that went to the mirror's disk because the memory for them was in use.
    pub spilled: u64,
    /// Times that a request had to wait (for a fetch, a copy, a claim or a cut).
    pub parked: u64,
    /// Checkpoints accepted.
    pub checkpoints: u64,
    /// Checkpoints that became stable.
    pub stable: u64,
    /// Checkpoints that failed.
    pub failed: u64,
    /// Of these, how many because there was no room for copies and storing stood still.
    #[serde(default)]
    pub stalls: u64,
}

/// Why a request was not carried out.
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
    /// Too much is under way: try again later.
    Busy,
    /// Not from here, or not on this disk.
    Denied,
    /// Something on the host is broken: tell the operator.
    Unavailable,
}

/// Whether `label` can be a snapshot's label.
///
/// Letters, digits, `.`, `_` and `-`, at most [`MAX_LABEL`] bytes, at least one that is not a digit
/// (so that no label looks like a number), and not starting with `-` or `.`.
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
    fn a_checkpoint_needs_nothing_but_its_name() {
        let request: Request = serde_json::from_str(r#"{"op":"checkpoint"}"#).unwrap();
        assert_eq!(request, Request::Checkpoint(Checkpoint::default()));
    }

    #[test]
    fn the_wire_form_of_a_checkpoint_is_stable() {
        let request = Request::Checkpoint(Checkpoint {
            label: Some("before-upgrade".into()),
            consistency: Consistency::Filesystem,
            wait: Wait::Stable,
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
    }

    #[test]
    fn accepted_ends_only_the_exchange_that_waits_for_it() {
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
