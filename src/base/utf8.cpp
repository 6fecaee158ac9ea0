#include "base/utf8.h"

#include <cstdio>

namespace hybridopt {
namespace {

constexpr struct {
  uint32_t first, last;
} kHidden[] = {
    {0x00, 0x1f},        // control characters
    {0x7f, 0x9f},        // delete, and the control characters of ISO 8859
    {0xad, 0xad},        // soft hyphen
    {0x61c, 0x61c},      // Arabic letter mark
    {0x180e, 0x180e},    // Mongolian vowel separator
    {0x200b, 0x200f},    // zero-width characters; direction marks
    {0x2028, 0x202e},    // line and paragraph separators; directional embeddings and overrides
    {0x2060, 0x206f},    // zero-width characters; directional isolates
    {0xfeff, 0xfeff},    // byte order mark
    {0xfff9, 0xfffb},    // interlinear annotation
    {0xe0000, 0xe0fff},  // tags
};

bool IsHidden(uint32_t code) {
  for (const auto& range : kHidden)
    if (code >= range.first && code <= range.last) return true;
  return false;
}

// Returns the escape of the first character, or of the first byte if the text does not begin with a
// character.
std::string EscapeOf(const Utf8Character& front, char byte) {
  if (byte == '\n') return "\\n";
  if (byte == '\r') return "\\r";
  if (byte == '\t') return "\\t";
  char escape[16];
  if (front.bytes <= 1)
    std::snprintf(escape, sizeof(escape), "\\x%02x", static_cast<unsigned>(byte) & 0xff);
  else
    std::snprintf(escape, sizeof(escape), front.code < 0x10000 ? "\\u%04x" : "\\U%08x", front.code);
  return escape;
}

}  // namespace

Utf8Character FirstCharacter(std::string_view text) {
  const auto byte = [&](size_t i) -> uint32_t { return static_cast<unsigned char>(text[i]); };
  const uint32_t first = byte(0);
  if (first < 0x80) return {first, 1};
  const size_t bytes = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : first >= 0xc0 ? 2 : 0;
  if (bytes == 0 || first > 0xf4 || text.size() < bytes) return {0, 0};
  uint32_t code = first & (0x7fu >> bytes);
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return {0, 0};
    code = code << 6 | (byte(i) & 0x3f);
  }
  constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = code >= 0xd800 && code < 0xe000;
  if (code < kLeast[bytes] || code > 0x10ffff || surrogate) return {0, 0};
  return {code, bytes};
}

bool IsUtf8(std::string_view text) {
  while (!text.empty()) {
    const size_t bytes = FirstCharacter(text).bytes;
    if (bytes == 0) return false;
    text.remove_prefix(bytes);
  }
  return true;
}

std::string Printable(std::string_view text, size_t bytes_max) {
  std::string printable;
  while (!text.empty()) {
    const Utf8Character front = FirstCharacter(text);
    const std::string_view taken = text.substr(0, front.bytes == 0 ? 1 : front.bytes);
    const bool shows = front.bytes > 0 && !IsHidden(front.code);
    const std::string piece = shows ? std::string(taken) : EscapeOf(front, text[0]);
    if (printable.size() + piece.size() > bytes_max) break;
    printable += piece;
    text.remove_prefix(taken.size());
  }
  return printable;
}

}  // namespace hybridopt
