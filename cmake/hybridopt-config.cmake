include("${CMAKE_CURRENT_LIST_DIR}/hybridopt-targets.cmake")
