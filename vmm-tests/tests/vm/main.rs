//! Tests with real guests.
//!
//! `make vm-test` builds and fetches what these tests need, and runs them one after the other.

mod agent;
mod checkpoint;
mod clone;
mod cluster;
mod disk;
mod growth;
mod kills;
mod migration;

const MIB: u64 = 1 << 20;
