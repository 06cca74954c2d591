// The entry takes an array of 64-bit words: an address for each memref, then its dynamic sizes; a word for an index.
// RUN: gossamer-opt %s -p 'emit-entry,canonicalize,cse' | filecheck %s

// What each argument takes is noted on the module, and the function is called from the entry only.
// CHECK:       module attributes {kernel.words = {{\[\[}}0 : i32], [], [1 : i32], [], []]}
// CHECK:         func.func private @region(
// CHECK-LABEL:   func.func @entry(%arg0: !llvm.ptr) {

// memref<?x8xf32>: words 0 and 1, contiguous rows of 8.
// CHECK:           %[[A:.*]] = llvm.load %arg0 : !llvm.ptr -> !llvm.ptr
// CHECK:           %[[W1:.*]] = llvm.getelementptr %arg0[1] : (!llvm.ptr) -> !llvm.ptr, i64
// CHECK:           %[[ROWS:.*]] = llvm.load %[[W1]] : !llvm.ptr -> i64
// CHECK:           %[[D0:.*]] = llvm.insertvalue %[[A]], %{{.*}}[0]
// CHECK:           %[[D1:.*]] = llvm.insertvalue %[[A]], %[[D0]][1]
// CHECK:           %[[D2:.*]] = llvm.insertvalue %c0_i64, %[[D1]][2]
// CHECK:           %[[D3:.*]] = llvm.insertvalue %c8_i64, %[[D2]][3, 1]
// CHECK:           %[[D4:.*]] = llvm.insertvalue %c1_i64, %[[D3]][4, 1]
// CHECK:           %[[D5:.*]] = llvm.insertvalue %[[ROWS]], %[[D4]][3, 0]
// CHECK:           %[[D6:.*]] = llvm.insertvalue %c8_i64, %[[D5]][4, 0]
// CHECK:           %[[X:.*]] = builtin.unrealized_conversion_cast %[[D6]] : !llvm.struct<{{.*}}> to memref<?x8xf32>

// memref<f32>: word 2.
// CHECK:           llvm.getelementptr %arg0[2]
// CHECK:           %[[S:.*]] = builtin.unrealized_conversion_cast %{{.*}} : !llvm.struct<(ptr, ptr, i64)> to memref<f32>

// memref<4x?x2xf32>: words 3 and 4; the first stride is a product.
// CHECK:           llvm.getelementptr %arg0[3]
// CHECK:           llvm.getelementptr %arg0[4]
// CHECK:           %[[SIZE:.*]] = llvm.load
// CHECK:           %[[STRIDE:.*]] = arith.muli %[[SIZE]], %c2_i64
// CHECK:           llvm.insertvalue %[[STRIDE]], %{{.*}}[4, 0]

// memref<8xbf16>: word 5; index: word 6.
// CHECK:           llvm.getelementptr %arg0[5]
// CHECK:           llvm.getelementptr %arg0[6]
// CHECK:           %[[T:.*]] = llvm.load
// CHECK:           %[[THREADS:.*]] = builtin.unrealized_conversion_cast %[[T]] : i64 to index
// CHECK:           call @region(%[[X]], %[[S]], %{{.*}}, %{{.*}}, %[[THREADS]])
func.func @region(%x: memref<?x8xf32>, %s: memref<f32>, %m: memref<4x?x2xf32>, %b: memref<8xbf16>, %threads: index) {
  return
}
