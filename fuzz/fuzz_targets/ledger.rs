//! Whatever a ledger of requests holds: each chain is found once, and none that the guest does not wait for.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cairn_backend::fuzzing::ledger(data));
