//! What is imported: a raw file, a raw stream, or the result of a conversion.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use cairn_store::{Error as StoreError, SECTOR_SIZE};

use super::{Options, qemu_img};
use crate::failure::{Doing, Exit, Failure, Outcome};
use crate::image_format::{Format, HEADER};
use crate::images::geometry;

/// The bytes of a disk.
pub(super) enum Source {
    File(File),
    Stream(Box<dyn Read + Send>),
}

impl Source {
    /// Opens a source, and converts it if it is not raw.
    pub(super) fn open(
        path: &Path,
        options: &Options,
        doing: &impl Fn() -> String,
    ) -> Outcome<Source> {
        if path == Path::new("-") {
            return Source::stream(io::stdin(), options.format, doing);
        }
        let file = File::open(path).doing(doing)?;
        if file.metadata().doing(doing)?.is_dir() {
            let why = StoreError::BadArgument("it is a directory; name a file or a disk".into());
            return Err(why).doing(doing);
        }
        let format = qemu_img::format_of(&file, options.format, doing)?;
        if format == Format::Raw {
            return Ok(Source::File(file));
        }
        let check_size =
            |size: u64| geometry(size.next_multiple_of(SECTOR_SIZE), options.chunk_size).map(drop);
        qemu_img::to_raw(&file, format, check_size, options.style, doing).map(Source::File)
    }

    /// A raw stream.
    fn stream(
        mut stream: impl Read + Send + 'static,
        format: Option<Format>,
        doing: &impl Fn() -> String,
    ) -> Outcome<Source> {
        let mut header = Vec::new();
        let format = match format {
            Some(format) => format,
            None => {
                stream.by_ref().take(HEADER as u64).read_to_end(&mut header).doing(doing)?;
                qemu_img::format_of_stream(&header, doing)?
            }
        };
        if format == Format::Raw {
            return Ok(Source::Stream(Box::new(io::Cursor::new(header).chain(stream))));
        }
        let why = format!(
            "a stream must be raw, and this is a {} image; import it from a file, or use --format \
             raw if it is the content of a raw disk",
            format.name()
        );
        Err(Failure::new(Exit::Usage, doing(), why))
    }
}
