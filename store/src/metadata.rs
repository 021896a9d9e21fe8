//! The metadata of a snapshot: values under keys, which users choose. Bounded in number and size.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::name::is_plain;

/// The most keys that a snapshot has.
pub const MAX_METADATA_KEYS: usize = 16;

/// The longest value, in bytes.
pub const MAX_METADATA_VALUE: usize = 256;

/// The most bytes of all keys and values of a snapshot.
pub const MAX_METADATA_BYTES: usize = 2048;

/// The most bytes of [`Metadata::to_text`].
pub const MAX_METADATA_TEXT: usize = MAX_METADATA_BYTES + 2 * MAX_METADATA_KEYS;

const KEY_RULE: &str = "it has 1 to 64 letters, digits, '.', '_' or '-', and does not start with \
                        '-' or '.'";
const VALUE_RULE: &str = "it has at most 256 bytes and no control characters";
const PAIR_RULE: &str = "write it as KEY=VALUE";

/// Values under keys. Each key and value was checked.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "BTreeMap<String, String>", into = "BTreeMap<String, String>")]
pub struct Metadata(BTreeMap<String, String>);

impl Metadata {
    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }

    /// All keys with their values, in the order of the keys.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value.as_str()))
    }

    /// Whether there is no key.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Sets the value of a key. An error changes nothing.
    pub fn set(&mut self, key: &str, value: &str) -> Result<()> {
        check_key(key)?;
        if value.len() > MAX_METADATA_VALUE || value.chars().any(char::is_control) {
            let what = "a value of a snapshot's metadata";
            return Err(Error::BadName {
                what,
                name: value.escape_debug().to_string(),
                rule: VALUE_RULE,
            });
        }
        let replaced = self.0.insert(key.to_owned(), value.to_owned());
        let refused = self.check_bounds();
        if refused.is_err() {
            match replaced {
                Some(before) => drop(self.0.insert(key.to_owned(), before)),
                None => self.remove(key),
            }
        }
        refused
    }

    /// Removes a key, if it is there.
    pub fn remove(&mut self, key: &str) {
        self.0.remove(key);
    }

    /// One line for each key, as `key=value`.
    pub fn to_text(&self) -> String {
        self.iter().map(|(key, value)| format!("{key}={value}\n")).collect()
    }

    /// The metadata of this text: see [`Metadata::to_text`].
    pub fn from_text(text: &str) -> Result<Metadata> {
        let mut metadata = Metadata::default();
        for line in text.lines() {
            let (key, value) = parse_pair(line)?;
            metadata.set(key, value)?;
        }
        Ok(metadata)
    }

    fn check_bounds(&self) -> Result<()> {
        let too_large = |what, actual, limit| Err(Error::TooLarge { what, actual, limit });
        let bytes = self.iter().map(|(key, value)| key.len() + value.len()).sum();
        if self.0.len() > MAX_METADATA_KEYS {
            let what = "the number of keys in a snapshot's metadata";
            return too_large(what, self.0.len(), MAX_METADATA_KEYS);
        }
        if bytes > MAX_METADATA_BYTES {
            return too_large("a snapshot's metadata, in bytes,", bytes, MAX_METADATA_BYTES);
        }
        Ok(())
    }
}

impl TryFrom<BTreeMap<String, String>> for Metadata {
    type Error = Error;

    fn try_from(pairs: BTreeMap<String, String>) -> Result<Metadata> {
        let mut metadata = Metadata::default();
        for (key, value) in &pairs {
            metadata.set(key, value)?;
        }
        Ok(metadata)
    }
}

impl From<Metadata> for BTreeMap<String, String> {
    fn from(metadata: Metadata) -> Self {
        metadata.0
    }
}

/// Checks the key of a value.
pub fn check_key(key: &str) -> Result<()> {
    if is_plain(key) {
        return Ok(());
    }
    let what = "a key of a snapshot's metadata";
    Err(Error::BadName { what, name: key.escape_debug().to_string(), rule: KEY_RULE })
}

/// Parses `KEY=VALUE`. The value may contain `=`.
pub fn parse_pair(text: &str) -> Result<(&str, &str)> {
    let parts = text.split_once('=');
    parts.ok_or_else(|| Error::BadName {
        what: "a snapshot's metadata",
        name: text.escape_debug().to_string(),
        rule: PAIR_RULE,
    })
}

#[cfg(test)]
mod tests {
    use super::{MAX_METADATA_KEYS, MAX_METADATA_TEXT, Metadata, parse_pair};

    #[test]
    fn odd_keys_and_values_are_refused_and_change_nothing() {
        let mut metadata = Metadata::default();
        metadata.set("job.step_1-a", "a = ü, 2").unwrap();
        let before = metadata.clone();
        for (key, value) in
            [("", "x"), ("a b", "x"), ("-a", "x"), ("ä", "x"), ("a", "x\ny"), ("a", "\u{7f}")]
        {
            let message = metadata.set(key, value).unwrap_err().to_string();
            assert!(!message.chars().any(char::is_control), "{message:?}");
        }
        metadata.set("a", &"x".repeat(257)).unwrap_err();
        assert_eq!(metadata, before);
        assert!(parse_pair("owner").is_err());
        assert_eq!(parse_pair("a=b=c").unwrap(), ("a", "b=c"));
    }

    #[test]
    fn the_number_and_the_size_are_bounded() {
        let mut metadata = Metadata::default();
        for i in 0..MAX_METADATA_KEYS {
            metadata.set(&format!("k{i}"), &"v".repeat(110)).unwrap();
        }
        metadata.set("more", "").unwrap_err();
        metadata.set("k0", &"v".repeat(256)).unwrap();
        metadata.set("k1", &"w".repeat(256)).unwrap_err();
        assert_eq!(metadata.get("k1"), Some(&*"v".repeat(110)));
        assert!(metadata.to_text().len() <= MAX_METADATA_TEXT);
        let again: Metadata =
            serde_json::from_value(serde_json::to_value(&metadata).unwrap()).unwrap();
        assert_eq!(again, metadata);
        assert_eq!(Metadata::from_text(&metadata.to_text()).unwrap(), metadata);
        serde_json::from_str::<Metadata>(r#"{"a b":"c"}"#).unwrap_err();
    }
}
