//! A repository on many machines.
//!
//! | part | is |
//! |---|---|
//! | [`Redundancy`] | how a blob is kept safe |
//! | [`fragment`] | a blob in parts |
//! | [`placement`] | which peers hold the parts |
//! | [`peer`] | a process that holds them |
//! | [`wire`] | what is said to it |
//! | [`identity`] | who may say it |
//! | [`Connection`] | who says it |
//! | [`Cluster`] | many peers as one place for blobs |
//! | [`repair`] | what keeps it whole |

mod client;
mod connection;
pub mod fragment;
mod frames;
pub mod identity;
pub mod peer;
pub mod placement;
mod redundancy;
pub mod repair;
pub mod wire;

pub use client::{Cluster, Member};
pub use connection::Connection;
pub use redundancy::Redundancy;
