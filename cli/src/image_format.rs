//! The formats of disk images, recognised by their content.

use clap::ValueEnum;

/// How many bytes of a file tell its format.
pub(crate) const HEADER: usize = 512;

/// How many bytes at the end of a file tell its format.
pub(crate) const FOOTER: usize = 512;

/// Where the descriptor inside a VMDK file begins, and its length in bytes.
pub(crate) const VMDK_DESCRIPTOR: (u64, usize) = (512, 20 * 512);

/// A format that can be imported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// The bytes of the disk
    Raw,
    /// QEMU's format
    Qcow2,
    /// VMware's format, in one file
    Vmdk,
    /// Hyper-V's format
    Vhdx,
}

impl Format {
    /// The format's name for `qemu-img`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Format::Raw => "raw",
            Format::Qcow2 => "qcow2",
            Format::Vmdk => "vmdk",
            Format::Vhdx => "vhdx",
        }
    }

    /// Recognises the format of a file by its first and last bytes. The error says what it is, if it is
    /// a format that cannot be imported. Everything else is raw.
    pub(crate) fn of_file(header: &[u8], footer: &[u8]) -> Result<Format, &'static str> {
        match Format::of(header)? {
            Format::Raw if footer.starts_with(b"conectix") => Err("a VHD image of fixed size"),
            format => Ok(format),
        }
    }

    /// Recognises the format of content by its first bytes.
    pub(crate) fn of(header: &[u8]) -> Result<Format, &'static str> {
        let begins = |magic: &[u8]| header.starts_with(magic);
        match header {
            _ if begins(b"QFI\xfb") && matches!(u32_at(header, 4), Some(2 | 3)) => {
                Ok(Format::Qcow2)
            }
            _ if begins(b"QFI\xfb") => Err("a qcow image of an unknown version"),
            _ if begins(b"KDMV") => Ok(Format::Vmdk),
            _ if begins(b"COWD") => Err("a VMDK image of an old version"),
            _ if begins(b"# Disk DescriptorFile") => {
                Err("the descriptor of a VMDK image whose data is in other files")
            }
            _ if begins(b"vhdxfile") => Ok(Format::Vhdx),
            _ if begins(b"conectix") => Err("a VHD image"),
            _ if begins(b"QED\0") => Err("a QED image"),
            _ if header.get(0x40..0x44) == Some(&[0x7f, 0x10, 0xda, 0xbe]) => Err("a VDI image"),
            _ => Ok(Format::Raw),
        }
    }
}

/// Fails if an image is not of this format, or names another file, which its reader would open.
/// `descriptor` is the part of the file at [`VMDK_DESCRIPTOR`]. The error says why.
///
/// `qemu-img` is asked again. This check comes first, because already asking it may open files.
pub(crate) fn check_references(
    format: Format,
    header: &[u8],
    descriptor: &[u8],
) -> Result<(), &'static str> {
    match format {
        Format::Raw => Ok(()),
        // A reader may take what was given as one format for another one.
        _ if Format::of(header) != Ok(format) => Err("it does not have the given format"),
        Format::Vhdx => Ok(()),
        Format::Qcow2 => check_qcow2(header),
        Format::Vmdk => check_vmdk(header, descriptor),
    }
}

const BACKING: &str = "it has a backing file: it holds only the changes to another image, \
                       whose name is in it";

fn check_qcow2(header: &[u8]) -> Result<(), &'static str> {
    const EXTERNAL_DATA: u64 = 1 << 2;
    let (Some(version), Some(backing)) = (u32_at(header, 4), u64_at(header, 8)) else {
        return Err("it is too short for a qcow2 image");
    };
    let features = if version < 3 { Some(0) } else { u64_at(header, 72) };
    match (backing, u32_at(header, 32), features) {
        (_, None, _) | (_, _, None) => Err("it is too short for a qcow2 image"),
        (1.., ..) => Err(BACKING),
        (_, _, Some(features)) if features & EXTERNAL_DATA != 0 => {
            Err("its data is in another file, whose name is in it")
        }
        (_, Some(1..), _) => Err("it is encrypted"),
        _ => Ok(()),
    }
}

fn check_vmdk(header: &[u8], descriptor: &[u8]) -> Result<(), &'static str> {
    let capacity = header.get(12..20).and_then(|bytes| bytes.as_array::<8>());
    match capacity.map(|bytes| u64::from_le_bytes(*bytes)) {
        None => return Err("it is too short for a VMDK image"),
        Some(0) => return Err("its data is in other files, whose names are in it"),
        Some(_) => {}
    }
    let lower = descriptor.to_ascii_lowercase();
    let has = |text: &[u8]| lower.windows(text.len()).any(|part| part == text);
    if has(b"parentfilenamehint") { Err(BACKING) } else { Ok(()) }
}

/// The number in big-endian order at an offset.
fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(*bytes.get(at..at + 4)?.as_array()?))
}

/// The number in big-endian order at an offset.
fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_be_bytes(*bytes.get(at..at + 8)?.as_array()?))
}

#[cfg(test)]
mod tests {
    use super::{BACKING, Format, HEADER, check_references};

    /// A header with these bytes at these offsets.
    fn header(parts: &[(usize, &[u8])]) -> Vec<u8> {
        let mut header = vec![0; HEADER];
        for (at, bytes) in parts {
            header[*at..at + bytes.len()].copy_from_slice(bytes);
        }
        header
    }

    #[test]
    fn formats_are_recognised_by_their_content() {
        let of = |parts: &[(usize, &[u8])]| Format::of(&header(parts));
        assert_eq!(of(&[(0, b"QFI\xfb\0\0\0\x02")]), Ok(Format::Qcow2));
        assert_eq!(of(&[(0, b"QFI\xfb\0\0\0\x03")]), Ok(Format::Qcow2));
        assert!(of(&[(0, b"QFI\xfb\0\0\0\x01")]).is_err());
        assert_eq!(of(&[(0, b"KDMV")]), Ok(Format::Vmdk));
        assert!(of(&[(0, b"# Disk DescriptorFile\n")]).unwrap_err().contains("other files"));
        assert_eq!(of(&[(0, b"vhdxfile")]), Ok(Format::Vhdx));
        assert!(of(&[(0, b"conectix")]).unwrap_err().contains("VHD"));
        assert!(of(&[(0x40, &[0x7f, 0x10, 0xda, 0xbe])]).unwrap_err().contains("VDI"));
        assert_eq!(of(&[(510, &[0x55, 0xaa])]), Ok(Format::Raw));
        assert_eq!(Format::of(b""), Ok(Format::Raw));
        assert!(Format::of(b"QFI\xfb").is_err());
    }

    #[test]
    fn images_that_name_other_files_are_refused() {
        let check = |format, parts: &[(usize, &[u8])], descriptor: &[u8]| {
            check_references(format, &header(parts), descriptor)
        };
        let (v2, v3) = ((0, &b"QFI\xfb\0\0\0\x02"[..]), (0, &b"QFI\xfb\0\0\0\x03"[..]));
        assert_eq!(check(Format::Qcow2, &[v2], b""), Ok(()));
        assert_eq!(check(Format::Qcow2, &[v3], b""), Ok(()));
        assert_eq!(check(Format::Qcow2, &[v3, (15, &[1])], b""), Err(BACKING));
        let external = check(Format::Qcow2, &[v3, (79, &[4])], b"");
        assert!(external.unwrap_err().contains("another file"));
        // In version 2 there is something else at this place.
        assert_eq!(check(Format::Qcow2, &[v2, (79, &[4])], b""), Ok(()));
        assert!(check(Format::Qcow2, &[v3, (35, &[1])], b"").unwrap_err().contains("encrypted"));
        let vmdk = (0, &b"KDMV"[..]);
        assert_eq!(check(Format::Vmdk, &[vmdk, (12, &[9])], b"CID=1\n"), Ok(()));
        assert!(check(Format::Vmdk, &[vmdk], b"").unwrap_err().contains("other files"));
        let parent = b"CID=1\nparentFileNameHint=\"/etc/passwd\"\n";
        assert_eq!(check(Format::Vmdk, &[vmdk, (12, &[9])], parent), Err(BACKING));
        assert_eq!(check(Format::Vhdx, &[(0, b"vhdxfile")], b""), Ok(()));
        let descriptor = (0, &b"# Disk DescriptorFile\n"[..]);
        for format in [Format::Qcow2, Format::Vmdk, Format::Vhdx] {
            let other = check(format, &[descriptor], b"");
            assert!(other.unwrap_err().contains("given format"), "{format:?}");
        }
    }

    #[test]
    fn a_header_of_any_length_is_judged_without_a_panic() {
        for bytes in [&b"QFI\xfb\0\0\0\x03"[..], b"KDMV", b"vhdxfile"] {
            let whole = header(&[(0, bytes)]);
            for len in 0..whole.len() {
                let header = &whole[..len];
                if let Ok(format) = Format::of(header) {
                    let _ = check_references(format, header, header);
                }
            }
        }
    }
}
