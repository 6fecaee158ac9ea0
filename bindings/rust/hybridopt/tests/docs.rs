//! The program in docs/BINDINGS.md is the example in the crate's documentation, which runs as a doc
//! test.

use std::fs;
use std::path::Path;

#[test]
fn the_docs_show_the_doc_test() {
    let source = include_str!("../src/lib.rs");
    let shown: Vec<&str> = source
        .lines()
        .skip_while(|line| *line != "//! ```")
        .skip(1)
        .take_while(|line| *line != "//! ```")
        .map(|line| line.strip_prefix("//! ").unwrap_or(""))
        .filter(|line| !line.starts_with("# "))
        .collect();
    assert!(shown.len() > 10, "the first example of lib.rs was not found");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../docs/BINDINGS.md");
    let page = fs::read_to_string(path).unwrap();
    let lines: Vec<&str> = page
        .lines()
        .skip_while(|line| *line != "```rust")
        .skip(1)
        .take_while(|line| *line != "```")
        .collect();
    assert_eq!(lines, shown, "left: docs/BINDINGS.md; right: the first example of lib.rs");
}
