//! What the tests of the backend share.
//!
//! ```text
//! Site ── directories and sockets of one test
//!  ├─ repository  images in, snapshots out, without the backend
//!  ├─ Backend     the real `cairn-blk` process
//!  ├─ Device      a vhost-user client: the guest's side of the disk
//!  └─ Control     the operator's side
//! ```
#![allow(dead_code, reason = "each test program uses its own part")]

pub(crate) mod backend;
pub(crate) mod control;
pub(crate) mod device;
pub(crate) mod repository;
pub(crate) mod rng;
pub(crate) mod sys;
