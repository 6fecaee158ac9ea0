// UTF-8: its characters one by one, and texts that are safe to show. The text of a file, or a file
// name, may come from an attacker: on a terminal it could move the cursor, change what was shown
// before, or turn the direction of writing. So every text for people goes through Printable: errors
// in Status::Error, and the tables of the command-line tool.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace hybridopt {

struct Utf8Character {
  uint32_t code;
  size_t bytes;  // 0: the text does not begin with a character
};

// The character at the front of a text that is not empty, in UTF-8 as Unicode defines it: shortest
// forms, no surrogates.
Utf8Character FirstCharacter(std::string_view text);

bool IsUtf8(std::string_view text);

// Returns the text with an escape for each control character (line ends and tabs among them), for
// each invisible character that changes how others are shown, and for each byte that is not UTF-8:
// \n, \x1b, \u202e, \U000e0041. Other characters stay as they are, so a text that is printable
// already does not change. The result ends before the character with which it would have more than
// `bytes_max` bytes.
std::string Printable(std::string_view text, size_t bytes_max = std::string::npos);

}  // namespace hybridopt
