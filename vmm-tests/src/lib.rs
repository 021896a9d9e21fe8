//! Boots real guests under QEMU with disks that Cairn serves.
//!
//! ```text
//!  Lab ───── the directory of one test: repository, mirrors, sockets, logs
//!   ├─ cairn()      the operator's command line
//!   ├─ Cluster      a catalog and peers, if the repository is in a cluster
//!   ├─ Backend      one cairn-blk ◄── vhost-user-blk ──┐
//!   └─ Guest        one QEMU ─────────────────────────┘  with its vsock device,
//!        ├─ Console   runs commands in the guest
//!        └─ Migration moves the guest to another QEMU
//! ```
//!
//! A guest consists of a kernel and an initramfs ([`Tools`] finds them, `make setup` obtains them).
//! Its disks hold data and not the system, so a test decides what is read from them and when.
//!
//! Every process is killed when the thread that started it ends, so a test that is killed leaves no
//! process.

mod accel;
mod backend;
mod cluster;
mod console;
mod control;
mod guest;
pub mod image;
mod lab;
mod migration;
mod monitor;
mod process;
mod qemu;
mod tools;

pub use backend::{Backend, Disk};
pub use cluster::{Cluster, in_cluster};
pub use console::Output;
pub use guest::Guest;
pub use lab::{Lab, in_lab};
pub use migration::Migration;
pub use process::Process;
pub use tools::Tools;
