// The events that the recorder has written.
#pragma once

#include <string>
#include <thread>
#include <vector>

struct RecordedEvent {
  std::thread::id thread;
  std::string name;  // "" ends the thread's latest range
};

using TakeRecordedFunction = void(std::vector<RecordedEvent>* taken);
