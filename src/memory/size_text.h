// Numbers of bytes as people read them.
#pragma once

#include <cstdint>
#include <cstdio>
#include <iterator>
#include <string>

namespace hybridopt {

// "13.6 KiB"; below 1024 plain "17 B".
inline std::string SizeText(uint64_t bytes) {
  if (bytes < 1024) return std::to_string(bytes) + " B";
  const char* const units[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double size = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  // 1023.95 would be printed as 1024.0, which is 1.0 of the next unit.
  for (; size >= 1023.95 && unit + 1 < std::size(units); ++unit) size /= 1024;
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f %s", size, units[unit]);
  return text;
}

// For errors, which also have the exact number: "13926 bytes (13.6 KiB)"; below 1024 "17 bytes".
inline std::string BytesText(uint64_t bytes) {
  const std::string exact = std::to_string(bytes) + (bytes == 1 ? " byte" : " bytes");
  return bytes < 1024 ? exact : exact + " (" + SizeText(bytes) + ")";
}

}  // namespace hybridopt
