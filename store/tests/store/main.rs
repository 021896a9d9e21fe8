//! Tests of the repository through its public interface: threads, processes, damage, full disks and
//! power cuts.

mod documents;
mod ephemeral;
mod fixtures;
mod full_disk;
mod images;
mod lease;
mod peer_power_cut;
mod power_cut;
mod processes;
mod stolen_keys;
mod support;
