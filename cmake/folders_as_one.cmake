# compile_folders_as_one(TARGET SOURCE...): compiles the sources of a folder of src/ as one, which takes a third
# of the time: most of it goes into the headers that all include. The build of developers is compiled file by
# file, so each file has the headers that it needs, and a change compiles one file. Kernels are compiled file by
# file everywhere, because Highway includes theirs several times.
function(compile_folders_as_one target)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  foreach(source IN LISTS ARGN)
    if(source MATCHES "(^|/)src/([a-z_]+)[/.]" AND NOT CMAKE_MATCH_2 STREQUAL "kernels")
      set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${CMAKE_MATCH_2})
    endif()
  endforeach()
endfunction()
