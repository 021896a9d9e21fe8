//! What the catalog knows about images, snapshots and mirrors.

use std::fmt;
use std::str::FromStr;

use crate::encoding::StoragePolicy;
use crate::error::{Error, Result};
use crate::geometry::Geometry;
use crate::id::MirrorId;
use crate::name::{ImageName, SnapshotRef};
use crate::process::{boot_id, host_name};
use crate::tree::Root;

/// Declares an enum that is kept and shown as one word for each variant.
macro_rules! word_enum {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $word:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$variant_doc])* $variant),+
        }

        impl $name {
            /// The word for it, as it is stored and shown.
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $word),+
                }
            }

        }

        impl FromStr for $name {
            type Err = String;

            fn from_str(word: &str) -> std::result::Result<Self, String> {
                match word {
                    $($word => Ok(Self::$variant),)+
                    _ => Err(format!("'{word}' is not a {}", stringify!($name))),
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.as_str())
            }
        }
    };
}

word_enum!(
    /// How far a snapshot has come. It leaves `Pending` once and for all; `Available` becomes `Stable`.
    SnapshotState {
        /// Announced; its content is on the way.
        Pending = "pending",
        /// Published and readable, with less than its redundancy: the rest is on the way.
        Available = "available",
        /// Published and durable, with its full redundancy.
        Stable = "stable",
        /// Given up; it has no content.
        Failed = "failed",
    }
);

word_enum!(
    /// How much the content of a snapshot can be relied on after a restart.
    Consistency {
        /// As after a power cut.
        Crash = "crash",
        /// The file systems were frozen.
        Filesystem = "filesystem",
        /// The application had written its whole state.
        Application = "application",
    }
);

word_enum!(
    /// What a mirror may do with its image.
    Mode {
        /// Take checkpoints: one mirror of an image at a time.
        ReadWrite = "rw",
        /// Read only: any number of mirrors.
        ReadOnly = "ro",
    }
);

impl SnapshotState {
    /// Whether a snapshot in this state can be read.
    pub fn has_content(self) -> bool {
        matches!(self, SnapshotState::Available | SnapshotState::Stable)
    }
}

/// An immutable state of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The image.
    pub image: ImageName,
    /// Its number in the image, from 1.
    pub number: u64,
    /// The number of the snapshot that it was derived from.
    pub parent: Option<u64>,
    /// Its content. Meaningful only when it has some: see [`Snapshot::require_content`].
    pub root: Root,
    /// When it was asked for: seconds since 1970, UTC.
    pub time: u64,
    /// The shape of the disk.
    pub geometry: Geometry,
    /// How its content is kept safe.
    pub policy: StoragePolicy,
    /// A second name, unique in the image.
    pub label: Option<String>,
    /// How far it has come.
    pub state: SnapshotState,
    /// How much its content can be relied on.
    pub consistency: Consistency,
    /// Bytes of the chunks that changed since its parent.
    pub dirty_bytes: u64,
    /// Bytes that the repository did not have before.
    pub stored_bytes: u64,
    /// Bytes that were sent for it, with the redundancy.
    pub sent_bytes: u64,
    /// Bytes of its chunks that were not sent: the repository had them.
    pub saved_bytes: u64,
    /// How long the guest waited for the cut, in microseconds.
    pub pause_us: u64,
    /// Why it failed.
    pub reason: Option<String>,
    /// The mirror that took it.
    pub mirror: Option<MirrorId>,
}

impl Snapshot {
    /// `image@number`.
    pub fn name(&self) -> SnapshotRef {
        SnapshotRef::number(&self.image, self.number)
    }

    /// Fails unless the snapshot has content.
    pub fn require_content(&self) -> Result<()> {
        if self.state.has_content() {
            return Ok(());
        }
        let (name, state) = (self.name().to_string(), self.state.as_str());
        Err(Error::WrongState { name, state, reason: self.reason.clone() })
    }
}

/// A named disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// Its name.
    pub name: ImageName,
    /// The shape of the disk.
    pub geometry: Geometry,
    /// When it was made: seconds since 1970, UTC.
    pub created: u64,
    /// How many snapshots it has, in any state.
    pub snapshots: u64,
    /// The number of its newest snapshot with content.
    pub newest: Option<u64>,
    /// The snapshot that it was cloned from, as it was named then.
    pub origin: Option<String>,
    /// How its content is kept safe.
    pub policy: StoragePolicy,
}

/// A snapshot that a mirror announces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewSnapshot {
    /// One of the mirror's reserved numbers.
    pub number: u64,
    /// A second name, unique in the image.
    pub label: Option<String>,
    /// How much the content can be relied on.
    pub consistency: Consistency,
    /// When it was asked for: seconds since 1970, UTC.
    pub time: u64,
    /// Bytes of the chunks that changed, as far as it is known.
    pub dirty_bytes: u64,
    /// How long the guest waited for the cut, in microseconds.
    pub pause_us: u64,
}

/// Who attaches a mirror. The process must be of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MirrorOwner {
    /// The mirror.
    pub id: MirrorId,
    /// This host's name, for people.
    pub host: String,
    /// The mirror's directory, for people.
    pub path: String,
    /// The process that serves the mirror.
    pub pid: u32,
    /// The boot of the host's kernel.
    pub boot_id: String,
}

impl MirrorOwner {
    /// A mirror that this process serves from this directory.
    pub fn this_process(id: MirrorId, path: impl Into<String>) -> Result<Self> {
        let (host, pid, boot_id) = (host_name()?, std::process::id(), boot_id()?);
        Ok(Self { id, host, path: path.into(), pid, boot_id })
    }
}

/// A mirror that the catalog knows, in use or not. It keeps its parent's content from being removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MirrorRecord {
    /// The mirror.
    pub id: MirrorId,
    /// Its image.
    pub image: ImageName,
    /// The host it was last attached on.
    pub host: String,
    /// Its directory there.
    pub path: String,
    /// What it may do.
    pub mode: Mode,
    /// The number of the snapshot that its unchanged parts come from.
    pub parent: u64,
    /// The content of that snapshot.
    pub root: Root,
    /// When it was last attached: seconds since 1970, UTC.
    pub attached: u64,
    /// The process that holds the image's lease for it, while that is live.
    pub writer: Option<u32>,
}
