//! Images, snapshots and mirrors, as the catalog describes them.

use std::fmt;
use std::str::FromStr;

use crate::encoding::StoragePolicy;
use crate::error::{Error, Result};
use crate::geometry::Geometry;
use crate::id::{ImageId, MirrorId};
use crate::metadata::Metadata;
use crate::name::{ImageName, SnapshotRef};
use crate::process::{LockedFile, boot_id, host_name};
use crate::tree::Root;

/// Declares an enum that is stored and shown as one word for each variant.
macro_rules! word_enum {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $word:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$variant_doc])* $variant),+
        }

        impl $name {
            /// The word for the variant, as it is stored and shown.
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
                    _ => Err(format!("'{word}' is none of {}", [$($word),+].join(", "))),
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
    /// The state of a snapshot.
    ///
    /// ```text
    /// Pending ─┬─► Available ─┬─► Stable ─┬─► Removing
    ///          ├──────────────│────▲      │      ▲
    ///          └─► Failed ────┴───────────┴──────┘
    /// ```
    SnapshotState {
        /// Announced. Its content is being stored.
        Pending = "pending",
        /// Published. Every blob can be read, perhaps without full redundancy.
        Available = "available",
        /// Published. Every blob is durable with its full redundancy.
        Stable = "stable",
        /// The commit failed. The snapshot has no content.
        Failed = "failed",
        /// Its removal has begun and is not complete. The snapshot has no content.
        Removing = "removing",
    }
);

word_enum!(
    /// How consistent the content of a snapshot is.
    Consistency {
        /// As after a power cut of the guest.
        Crash = "crash",
        /// The guest's file systems were frozen.
        Filesystem = "filesystem",
        /// The application had written its complete state.
        Application = "application",
    }
);

word_enum!(
    /// What a mirror may do with its image.
    Mode {
        /// It may write and take checkpoints. One mirror of an image at a time.
        ReadWrite = "rw",
        /// It may only read. Any number of mirrors.
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
    /// The image's id.
    pub image_id: ImageId,
    /// Its number in the image, from 1.
    pub number: u64,
    /// The number of the snapshot that it was derived from.
    pub parent: Option<u64>,
    /// Its content. Valid only if the state has content: see [`Snapshot::require_content`].
    pub root: Root,
    /// When it was requested: seconds since 1970, UTC.
    pub time: u64,
    /// The size of the disk when the snapshot was taken, and of its chunks.
    pub geometry: Geometry,
    /// How its content is stored on peers.
    pub policy: StoragePolicy,
    /// Further names, each unique among the image's snapshots that have not failed.
    pub labels: Vec<String>,
    /// Whether it is kept from removal.
    pub is_pinned: bool,
    /// What its users say about it.
    pub metadata: Metadata,
    /// Whether it was requested from inside the guest.
    pub is_from_guest: bool,
    /// Whether its guest does not need it any more.
    pub is_obsolete: bool,
    /// Its state.
    pub state: SnapshotState,
    /// How consistent its content is.
    pub consistency: Consistency,
    /// Bytes of the chunks that changed since its parent.
    pub dirty_bytes: u64,
    /// Bytes that the repository did not have before.
    pub stored_bytes: u64,
    /// Bytes that were sent for it, with the redundancy.
    pub sent_bytes: u64,
    /// Bytes of its chunks that were not sent, because the repository had them.
    pub saved_bytes: u64,
    /// How long the guest waited for the freeze, in microseconds.
    pub pause_us: u64,
    /// Why it failed, if it did.
    pub reason: Option<String>,
    /// The mirror that took it.
    pub mirror: Option<MirrorId>,
}

impl Snapshot {
    /// The name `image@number`.
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
    /// The size of the disk and of its chunks. Snapshots may be smaller.
    pub geometry: Geometry,
    /// When it was created: seconds since 1970, UTC.
    pub created: u64,
    /// The number of its snapshots, in any state.
    pub snapshots: u64,
    /// The number of its pinned snapshots.
    pub pinned: u64,
    /// The number of its snapshots that their guests do not need any more.
    pub obsolete: u64,
    /// The number of its newest snapshot with content.
    pub newest: Option<u64>,
    /// The snapshot that it was cloned from, under its name at that time.
    pub origin: Option<String>,
    /// How its content is stored on peers.
    pub policy: StoragePolicy,
}

/// A snapshot that a mirror announces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewSnapshot {
    /// One of the mirror's reserved numbers.
    pub number: u64,
    /// A second name, unique among the image's snapshots that have not failed.
    pub label: Option<String>,
    /// What its user says about it.
    pub metadata: Metadata,
    /// Whether it was requested from inside the guest.
    pub is_from_guest: bool,
    /// The size of the disk.
    pub size: u64,
    /// How consistent the content is.
    pub consistency: Consistency,
    /// When it was requested: seconds since 1970, UTC.
    pub time: u64,
    /// Bytes of the chunks that changed. The publication may correct this number.
    pub dirty_bytes: u64,
    /// How long the guest waited for the freeze, in microseconds.
    pub pause_us: u64,
}

/// The process that attaches a mirror. It must run on this host.
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
    /// The id of the current boot of the host's kernel.
    pub boot_id: String,
    /// The file that the process has locked, and keeps locked while it serves the mirror. With it
    /// the process takes the lease over from an earlier process of the mirror, even if it cannot
    /// see that the other one is dead. `None` if there is no such file.
    pub lock: Option<LockedFile>,
    /// Whether the mirror's reference to its parent ends when no process renews it.
    pub is_ephemeral: bool,
}

impl MirrorOwner {
    /// The owner of a mirror that this process serves from the directory `path`.
    pub fn this_process(id: MirrorId, path: impl Into<String>) -> Result<Self> {
        let (host, pid, boot_id) = (host_name()?, std::process::id(), boot_id()?);
        Ok(Self { id, host, path: path.into(), pid, boot_id, lock: None, is_ephemeral: false })
    }

    /// The same owner, with the file that it has locked.
    #[must_use]
    pub fn with_lock(self, lock: Option<LockedFile>) -> Self {
        Self { lock, ..self }
    }

    /// The same owner, for an ephemeral mirror or another one.
    #[must_use]
    pub fn with_ephemeral(self, is_ephemeral: bool) -> Self {
        Self { is_ephemeral, ..self }
    }
}

/// The parent of a mirror, as the mirror's own files name it. With it a mirror can continue after
/// the catalog was rebuilt, and an older copy of the mirror is recognised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MirrorParent {
    /// The mirror's image.
    pub image: ImageId,
    /// The number of the snapshot that its unchanged parts come from.
    pub number: u64,
    /// The content of that snapshot.
    pub root: Root,
    /// The highest number of a snapshot that these files may have published.
    pub announced: u64,
}

/// A mirror that the catalog knows, in use or not. Its parent's content is not removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MirrorRecord {
    /// The mirror.
    pub id: MirrorId,
    /// Its image.
    pub image: ImageName,
    /// The host on which it was last attached.
    pub host: String,
    /// Its directory there.
    pub path: String,
    /// What it may do with its image.
    pub mode: Mode,
    /// The number of the snapshot that its unchanged parts come from.
    pub parent: u64,
    /// The content of that snapshot.
    pub root: Root,
    /// When it was last attached: seconds since 1970, UTC.
    pub attached: u64,
    /// When a process last used it, at most an hour too early: seconds since 1970, UTC, by the clock of
    /// its host.
    pub seen: u64,
    /// Whether the catalog forgets it when its process has not renewed it for ten minutes.
    pub is_ephemeral: bool,
    /// The process that holds the image's lease for this mirror, while the lease is live.
    pub writer: Option<u32>,
}
