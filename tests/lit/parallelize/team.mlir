// The body of an scf.parallel becomes a function that every thread of PyTorch's OpenMP team runs.
// RUN: gossamer-opt %s -p parallelize --split-input-file | filecheck %s

// The number of tasks and what the body captures travel in a struct; each thread takes every n-th task.
// CHECK-DAG:   func.func private @GOMP_parallel(!llvm.ptr, !llvm.ptr, i32, i32)
// CHECK-DAG:   func.func private @omp_get_num_threads() -> i32
// CHECK-DAG:   func.func private @omp_get_thread_num() -> i32
// CHECK-LABEL: func.func private @region_team(%arg0: !llvm.ptr) {
// CHECK:         %[[S:.*]] = llvm.load %arg0 : !llvm.ptr -> !llvm.struct<(i64, f32, struct<(ptr, ptr, i64, array<1 x i64>, array<1 x i64>)>)>
// CHECK:         %[[N:.*]] = builtin.unrealized_conversion_cast %{{.*}} : i64 to index
// CHECK:         %[[V:.*]] = llvm.extractvalue %[[S]][1]
// CHECK:         %[[X:.*]] = builtin.unrealized_conversion_cast %{{.*}} to memref<?xf32>
// CHECK:         %[[ME:.*]] = arith.index_cast %{{.*}} : i32 to index
// CHECK:         call @omp_get_num_threads()
// CHECK:         %[[TEAM:.*]] = arith.index_cast %{{.*}} : i32 to index
// CHECK:         scf.for %[[I:.*]] = %[[ME]] to %[[N]] step %[[TEAM]] {
// CHECK-NEXT:      memref.store %[[V]], %[[X]][%[[I]]]
// CHECK-NEXT:    }
// CHECK-NEXT:    return

// No more threads than tasks, and none but the caller for one task.
// CHECK-LABEL: func.func @region(
// CHECK-SAME:    %[[N:[a-z0-9]*]]: index, %[[THREADS:[a-z0-9]*]]: index) {
// CHECK:         %[[STRUCT:.*]] = llvm.alloca
// CHECK:         llvm.store %{{.*}}, %[[STRUCT]]
// CHECK:         %[[USED:.*]] = arith.minui %[[THREADS]], %[[N]]
// CHECK:         %[[MANY:.*]] = arith.cmpi ugt, %[[USED]], %c1
// CHECK:         scf.if %[[MANY]] {
// CHECK:           %[[F:.*]] = func.constant @region_team
// CHECK:           %[[POINTER:.*]] = builtin.unrealized_conversion_cast %[[F]]
// CHECK:           %[[SIZE:.*]] = arith.index_cast %[[USED]] : index to i32
// CHECK:           func.call @GOMP_parallel(%[[POINTER]], %[[STRUCT]], %[[SIZE]], %c0_i32)
// CHECK:         } else {
// CHECK-NEXT:      func.call @region_team(%[[STRUCT]])
// CHECK-NOT:     scf.parallel
func.func @region(%x: memref<?xf32>, %v: f32, %n: index, %threads: index) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  scf.parallel (%i) = (%c0) to (%n) step (%c1) {
    memref.store %v, %x[%i] : memref<?xf32>
    scf.reduce
  }
  return
}

// -----

// What an inner region captures counts too, and what it defines itself does not. Two loops make two teams.
// CHECK-LABEL: func.func private @two_team(
// CHECK:         scf.if
// CHECK-NEXT:      memref.store
// CHECK-LABEL: func.func private @two_team1(
// CHECK-LABEL: func.func @two(
// CHECK:         func.call @two_team(
// CHECK:         func.call @two_team1(
func.func @two(%x: memref<?xf32>, %v: f32, %b: i1, %n: index, %threads: index) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  scf.parallel (%i) = (%c0) to (%n) step (%c1) {
    scf.if %b {
      memref.store %v, %x[%i] : memref<?xf32>
    }
    scf.reduce
  }
  scf.parallel (%i) = (%c0) to (%n) step (%c1) {
    memref.store %v, %x[%i] : memref<?xf32>
    scf.reduce
  }
  return
}
