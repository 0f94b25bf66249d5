//@ in x=np.zeros(1, dtype=np.float32)
//@ out y:uint32[6,10]
//@ run grid=(10,6,1) threadgroup=(8,4,1)
//@ want y[5,9] == 1 * 2 + 1 and y[5,7] == 15 and y[0,9] == 1 and y[3,8] == 6
//@ body
uint3 p = thread_position_in_grid;
y[p.y * 10 + p.x] = thread_index_in_threadgroup;   // edge groups are 2 wide: index = y*2 + x
