// A named range of the calling thread's time, which GPU profilers show together with the work that it issues.
#pragma once

#include <string>

namespace ballast {

// Ranges of a thread end in the reverse order of their beginnings. Without a profiler they cost almost nothing.
class ProfilerRange {
 public:
  explicit ProfilerRange(const std::string& name);
  ~ProfilerRange();
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;
};

}  // namespace ballast
