//! A repository on many machines.
//!
//! | part | is |
//! |---|---|
//! | [`Keep`], [`Redundancy`] | how a blob is kept safe |
//! | [`fragment`] | a blob in parts |
//! | [`placement`] | which peers hold the parts |
//! | [`peer`] | a process that holds them |
//! | [`wire`] | what is said to it |
//! | [`identity`] | who may say it |
//! | [`Connection`] | who says it |
//! | [`Cluster`] | many peers as one place for blobs |
//! | [`ClusterBlobs`] | the same for threads, with a window of blobs on their way |
//! | [`repair`] | what keeps it whole |

mod blobs;
#[cfg(test)]
mod blobs_tests;
mod buffers;
mod client;
mod code;
mod collect;
mod compression;
mod connection;
pub(crate) mod follower;
pub mod fragment;
pub(crate) mod frames;
pub mod heart;
pub mod identity;
pub mod keeper;
mod known;
mod members;
pub mod membership;
mod names;
mod patient;
pub mod peer;
pub mod placement;
mod records;
mod redundancy;
pub mod repair;
mod space;
#[cfg(test)]
mod sweep_tests;
#[cfg(test)]
mod tests;
mod ways;
mod window;
pub mod wire;

pub use blobs::{ClusterBlobs, Counters};
pub use client::{Cluster, Stored};
pub use compression::Compression;
pub use connection::Connection;
pub use members::{Member, MemberState};
pub use redundancy::{Keep, Redundancy};
