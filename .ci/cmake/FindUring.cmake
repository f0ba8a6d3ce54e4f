# Uring::uring, the library liburing: its Debian package brings no CMake files.
find_path(URING_INCLUDE_DIR liburing.h)
find_library(URING_LIBRARY uring)
mark_as_advanced(URING_INCLUDE_DIR URING_LIBRARY)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Uring REQUIRED_VARS URING_LIBRARY URING_INCLUDE_DIR)

if(Uring_FOUND AND NOT TARGET Uring::uring)
  add_library(Uring::uring UNKNOWN IMPORTED)
  set_target_properties(Uring::uring PROPERTIES
    IMPORTED_LOCATION ${URING_LIBRARY}
    INTERFACE_INCLUDE_DIRECTORIES ${URING_INCLUDE_DIR})
endif()
