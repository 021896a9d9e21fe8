//! Detection of chunks of zeros, which are holes and are not stored.

/// Whether every byte is zero.
pub fn is_zero(bytes: &[u8]) -> bool {
    // With blocks of a fixed size, the compiler uses vector instructions. The scan ends at the
    // first block that is not zero.
    const BLOCK: usize = 1024;
    let mut blocks = bytes.chunks_exact(BLOCK);
    blocks.all(|block| block.iter().fold(0, |seen, byte| seen | byte) == 0)
        && blocks.remainder().iter().all(|byte| *byte == 0)
}

#[cfg(test)]
mod tests {
    use super::is_zero;

    #[test]
    fn a_single_bit_at_any_position_is_found() {
        let mut bytes = vec![0; 5000];
        assert!(is_zero(&bytes) && is_zero(&[]));
        for at in [0, 1023, 1024, 4095, 4096, 4999] {
            bytes[at] = 1;
            assert!(!is_zero(&bytes), "{at}");
            bytes[at] = 0;
        }
    }
}
