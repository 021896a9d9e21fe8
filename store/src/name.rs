//! Names of images and snapshots, as users write them: `image`, `image@3`, `image@label`, and the
//! prefix `folder/` of all images in a folder.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// The longest name of an image and the longest label, in bytes.
pub const MAX_NAME: usize = 64;

const IMAGE_RULE: &str = "it has 1 to 64 letters, digits, '.', '_' or '-', in parts that are \
                          separated by '/' and do not start with '-' or '.'";
const LABEL_RULE: &str = "it has 1 to 64 letters, digits, '.', '_' or '-', at least one of which \
                          is not a digit, and does not start with '-' or '.'";

/// The name of an image. Slashes separate its parts, as in `job42/node3`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ImageName(String);

impl ImageName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ImageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl FromStr for ImageName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text.len() <= MAX_NAME && text.split('/').all(is_plain) {
            return Ok(Self(text.into()));
        }
        Err(Error::BadName { what: "the name of an image", name: text.into(), rule: IMAGE_RULE })
    }
}

/// Some images: one of them, those in a folder, or all.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// All images: `/`.
    All,
    /// The images whose names begin with this name and a slash, as in `job42/`.
    Folder(ImageName),
    /// One image.
    Image(ImageName),
}

impl Scope {
    /// Whether the image is one of them.
    pub fn contains(&self, image: &ImageName) -> bool {
        match self {
            Scope::All => true,
            Scope::Folder(folder) => {
                let rest = image.0.strip_prefix(&folder.0);
                rest.is_some_and(|rest| rest.starts_with('/'))
            }
            Scope::Image(one) => one == image,
        }
    }

    /// All scopes that contain the image, the smallest first.
    pub fn all_of(image: &ImageName) -> Vec<Scope> {
        let slashes = image.0.rmatch_indices('/');
        let folders = slashes.map(|(at, _)| Scope::Folder(ImageName(image.0[..at].into())));
        let mut all = vec![Scope::Image(image.clone())];
        all.extend(folders);
        all.push(Scope::All);
        all
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scope::All => f.pad("/"),
            Scope::Folder(folder) => f.pad(&format!("{folder}/")),
            Scope::Image(image) => image.fmt(f),
        }
    }
}

impl FromStr for Scope {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text.strip_suffix('/') {
            Some("") => Ok(Scope::All),
            Some(folder) => folder.parse().map(Scope::Folder),
            None => text.parse().map(Scope::Image),
        }
    }
}

/// Selects a snapshot of an image.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Selector {
    /// The newest snapshot with content.
    Newest,
    /// The snapshot with this number, in any state.
    Number(u64),
    /// The snapshot with this label, in any state.
    Label(String),
}

/// The name of a snapshot, as users write it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SnapshotRef {
    /// The image.
    pub image: ImageName,
    /// Which of its snapshots.
    pub selector: Selector,
}

impl SnapshotRef {
    /// The name `image@number`.
    pub fn number(image: &ImageName, number: u64) -> Self {
        Self { image: image.clone(), selector: Selector::Number(number) }
    }
}

impl fmt::Display for SnapshotRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.selector {
            Selector::Newest => write!(f, "{}", self.image),
            Selector::Number(number) => write!(f, "{}@{number}", self.image),
            Selector::Label(label) => write!(f, "{}@{label}", self.image),
        }
    }
}

impl FromStr for SnapshotRef {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let Some((image, selector)) = text.split_once('@') else {
            return Ok(Self { image: text.parse()?, selector: Selector::Newest });
        };
        let image = image.parse()?;
        if is_number(selector) {
            let rule = "numbers start at 1 and fit 63 bits";
            return match selector.parse() {
                Ok(number) if (1..=i64::MAX as u64).contains(&number) => {
                    Ok(Self { image, selector: Selector::Number(number) })
                }
                _ => {
                    Err(Error::BadName { what: "a snapshot's number", name: selector.into(), rule })
                }
            };
        }
        check_label(selector)?;
        Ok(Self { image, selector: Selector::Label(selector.into()) })
    }
}

/// Checks a label. It follows the rules for one part of an image's name and has at least one character that is not
/// a digit, so that no label looks like a number.
pub(crate) fn check_label(label: &str) -> Result<()> {
    if is_plain(label) && !is_number(label) {
        return Ok(());
    }
    Err(Error::BadName { what: "a snapshot's label", name: label.into(), rule: LABEL_RULE })
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

pub(crate) fn is_plain(text: &str) -> bool {
    (1..=MAX_NAME).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
        && !text.starts_with(['-', '.'])
}

#[cfg(test)]
mod tests {
    use super::{ImageName, Scope, Selector, SnapshotRef};

    #[test]
    fn a_reference_names_the_newest_a_number_or_a_label() {
        let parse = |text: &str| text.parse::<SnapshotRef>().unwrap();
        assert_eq!(parse("vm1").selector, Selector::Newest);
        assert_eq!(parse("vm1@3").selector, Selector::Number(3));
        assert_eq!(parse("vm1@before-upgrade").selector, Selector::Label("before-upgrade".into()));
        for text in ["vm1", "vm1@3", "vm1@before-upgrade"] {
            assert_eq!(parse(text).to_string(), text);
        }
    }

    #[test]
    fn names_that_are_empty_or_look_like_paths_or_options_are_refused() {
        for bad in [
            "",
            ".",
            "..",
            "-x",
            ".x",
            "/",
            "a/",
            "/a",
            "a//b",
            "a/../b",
            "a b",
            "ä",
            "a@",
            &"x".repeat(65),
        ] {
            assert!(bad.parse::<ImageName>().is_err(), "{bad}");
        }
        assert_eq!("job42/node3".parse::<ImageName>().unwrap().as_str(), "job42/node3");
        for bad in ["@1", "vm@", "vm@0", "vm@a@b", "vm@-x", "vm@99999999999999999999"] {
            assert!(bad.parse::<SnapshotRef>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_scope_is_an_image_a_folder_or_all_images() {
        let image = |text: &str| text.parse::<ImageName>().unwrap();
        let scope = |text: &str| text.parse::<Scope>().unwrap();
        let all: Vec<_> = Scope::all_of(&image("a/b/c")).iter().map(ToString::to_string).collect();
        assert_eq!(all, ["a/b/c", "a/b/", "a/", "/"]);
        for text in all {
            assert!(scope(&text).contains(&image("a/b/c")), "{text}");
            assert_eq!(scope(&text).to_string(), text);
        }
        for other in ["a/b", "a/b/c/", "b/", "a/b/c/d", "a/bb/"] {
            assert!(!scope(other).contains(&image("a/b/c")), "{other}");
        }
        assert!(!scope("a/").contains(&image("a")));
        for bad in ["", "//", "a//", "/a/", "a b/", "*"] {
            assert!(bad.parse::<Scope>().is_err(), "{bad}");
        }
    }

    #[test]
    fn the_message_states_the_rule() {
        let message = "a b".parse::<ImageName>().unwrap_err().to_string();
        assert!(message.contains("'a b'") && message.contains("letters, digits"), "{message}");
    }
}
